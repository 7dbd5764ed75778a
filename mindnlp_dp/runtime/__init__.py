"""This package holds what one process needs, without communication: arrays, cores, devices, heartbeats, versions."""
