"""Shows results: ``mindnlp-dp report`` makes a page and a picture from runs, and ``mindnlp-dp plan`` prints plans."""
