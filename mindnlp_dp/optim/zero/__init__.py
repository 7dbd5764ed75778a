"""ZeRO 1 and 2: which rank updates which slice, and which rank has which part of the optimizer state."""
