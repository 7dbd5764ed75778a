"""Processes join a job here (backend_selection.py) and call the collectives of a group (process_group.py) on a transport."""
