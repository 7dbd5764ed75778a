"""This package makes MindNLP 0.4's Trainer data parallel."""
