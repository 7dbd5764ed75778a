"""This package holds what one process needs, without communication: arrays, cores, devices, heartbeats, versions.

The files do not depend on each other much; arrays.py and random_state.py are used most.
"""
