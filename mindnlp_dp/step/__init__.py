"""One update: from the micro steps of a window to new weights, the same on every rank."""
