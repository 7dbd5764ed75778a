"""This package treats NumPy arrays and MindSpore tensors alike: type names, conversion, checks and fingerprints."""
