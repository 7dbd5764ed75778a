"""Custom training loops: the train step (make_step.py), data position and checkpoints (resumable_run.py)."""
