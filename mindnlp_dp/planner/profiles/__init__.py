"""What the planner knows: architectures, the operators of a model, and clusters."""
