"""This package makes the Trainer of MindNLP 0.5, which is that of Hugging Face's Transformers, data parallel."""
