"""The seams to MindNLP's Trainers, a folder for each of its versions."""
