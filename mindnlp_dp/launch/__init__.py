"""Starting the processes of a job, and ending them together; who started this one. Knows nothing of training."""
