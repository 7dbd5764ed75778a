"""Global dropout: each sample's mask is a function of its position in the global batch, whichever rank computes it.

Read dropout_masks.py first, which draws the masks; then sample_layout.py, which finds the elements of each sample in a
tensor; then dropout_operators.py, which applies masks by MindSpore's operators. Our CPU kernels apply them themselves.
"""
