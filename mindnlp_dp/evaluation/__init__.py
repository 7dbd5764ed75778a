"""Every sample once, in data set order, the same answer on every rank."""
