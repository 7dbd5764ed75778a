"""Start, watch and end the processes of one host; a rank runs in worker.py."""
