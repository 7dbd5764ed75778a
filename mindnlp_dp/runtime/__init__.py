"""What a process stands on: its cores and threads, its autograd, its files. Knows nothing of other processes."""
