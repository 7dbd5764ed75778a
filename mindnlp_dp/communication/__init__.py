"""Processes join a job here (rendezvous.py, process_group.py) and call collectives (collectives.py) on a transport."""
