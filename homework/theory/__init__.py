"""The theory of the course as code: algorithms of all-reduce over send and receive, their costs, the laws of speed-up.

``homework/algorithms.py`` and ``homework/scaling.py`` use it. Nothing here imports MindSpore.
"""
