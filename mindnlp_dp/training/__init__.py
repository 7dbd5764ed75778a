"""This package makes MindNLP's Trainers data parallel, with a folder for each of MindNLP's release series."""
