"""The Trainer of MindNLP 0.5, which is that of Hugging Face's Transformers."""
