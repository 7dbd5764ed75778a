"""A loop of one's own: its step (step.py), its place in the data and its checkpoints (resumable_run.py)."""
