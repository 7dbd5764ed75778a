"""The integer program of the planner: its formulation, and its solution by SciPy's solver."""
