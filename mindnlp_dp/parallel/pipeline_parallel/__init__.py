"""Pipeline parallelism: stages, the messages between them, micro-batches, and weights that stages have in common."""
