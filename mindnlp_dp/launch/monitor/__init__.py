"""Monitor the ranks of one attempt: progress, hangs, the cause of a failure, lost ranks, and what the terminal shows."""
