"""This package evaluates a model on every sample once, and gives every rank the same result in data set order."""
