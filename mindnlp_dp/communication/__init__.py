"""Processes join a job and call the collectives of a group on a transport.

Read process_group.py first, which has the collectives; then backend_selection.py, which chooses a transport, and
transports/. batch_across_ranks.py and autograd_ops.py are for collectives inside of models.
"""
