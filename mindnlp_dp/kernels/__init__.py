"""What a model computes on a CPU, by BLAS and blocked NumPy, where MindSpore's own kernels are slow.

Goes in: float32 tensors in host memory, as they lie there. Comes out: tensors with the same values as MindSpore's own
operators give, within rounding, and recorded by its autograd. :mod:`functions` is what MindNLP's functions are replaced
with; each leaves to MindSpore whatever it was not made for, without a word. :func:`~mindnlp_dp.kernels.choice.choose`
says whether any of it is used.
"""
