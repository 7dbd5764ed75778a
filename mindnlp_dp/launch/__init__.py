"""Starts and ends the processes of a job. Contains no training code.

Read launch_job.py first, the attempts of a job; then monitor/attempt_monitor.py, how an attempt ends;
processes/local_host.py, how ranks start; rendezvous/server.py, how hosts meet; membership.py, how many hosts and ranks
the next attempt has.
"""
