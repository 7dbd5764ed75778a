"""Weights of a model that is built without them: read from safetensors files, or initialized."""
