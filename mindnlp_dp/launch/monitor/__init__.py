"""Monitor the ranks of one attempt: progress, hangs, causes of failures, lost ranks, and what the terminal shows."""
