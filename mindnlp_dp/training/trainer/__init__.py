"""The Trainer: what its versions for MindNLP 0.4 and 0.5 have in common, and a folder for each."""
