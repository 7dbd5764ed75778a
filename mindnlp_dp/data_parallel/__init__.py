"""This package replaces every rank's gradients by their weighted mean over all ranks, as PyTorch's DDP does."""
