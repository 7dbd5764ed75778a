"""Schedules of pipelines and of resharding, which the planner and training both use."""
