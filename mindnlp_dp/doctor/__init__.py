"""``mindnlp-dp doctor``: what is here, whether it fits together, and what to do where it does not."""
