"""Starting the processes of a job, and ending them together. Knows nothing of training."""
