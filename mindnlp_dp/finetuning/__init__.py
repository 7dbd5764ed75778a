"""What all fine-tuning recipes share: settings, the Trainer's arguments, times and results of a run."""
