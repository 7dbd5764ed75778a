"""The train step: one update, from the micro-steps of a gradient accumulation window to equal weights on every rank."""
