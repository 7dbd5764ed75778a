"""What this machine can do, measured, as a cluster that the planner plans for."""
