"""Processes join a job (backend_selection.py) and call the collectives of a group (process_group.py) on a transport."""
