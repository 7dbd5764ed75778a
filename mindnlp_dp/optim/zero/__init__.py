"""ZeRO 1 and 2: which rank updates which slice, and which rank has which part of the optimizer state.

Read partition.py first: the pieces of flat arrays that a rank of a host updates; state_registry.py has their state, and
owners.py gives each matrix to one rank, for Muon. device_updater.py shards the update of NPUs and GPUs, and
parameterwise.py that of optimizers that have no rule here, by full parameters.
"""
