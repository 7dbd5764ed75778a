"""Measures what this machine can do, and describes it as a cluster for the planner."""
