"""Shows results: ``mindnlp-dp report`` makes a page and a picture from runs, and ``mindnlp-dp plan`` prints plans.

Read runs.py first, the content of a run's report.json; then page.py.
"""
