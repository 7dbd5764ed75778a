"""Schedules of pipelines and of resharding, and the sizes of a device mesh; the planner and training both use them."""
