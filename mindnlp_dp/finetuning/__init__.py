"""What all fine-tuning recipes share: settings, the Trainer's arguments, times and results of a run.

Read settings.py and files.py first, then job.py, the steps of a job.
"""
