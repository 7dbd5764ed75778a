"""The processes of a job meet (rendezvous.py, process_group.py) and talk (collectives.py), by a transport each."""
