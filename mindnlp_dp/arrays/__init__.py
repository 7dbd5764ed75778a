"""NumPy arrays and MindSpore tensors, looked at alike: the names of their types, their values, what one look tells."""
