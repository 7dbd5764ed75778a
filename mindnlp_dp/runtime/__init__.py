"""This package holds what one process needs, without communication: cores, threads, autograd, files, heartbeats."""
