"""A loop of one's own: its step (make_step.py), its place in the data and its checkpoints (resumable_run.py)."""
