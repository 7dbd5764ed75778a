"""CPU kernels, with BLAS and blocked NumPy, for layers whose MindSpore kernels are slow.

The patches of MindNLP and MindSpore call :mod:`functions` on float32 tensors in host memory, which are not copied. The
results equal those of MindSpore's own operators within rounding, and its autograd records them. A call that these
kernels do not support runs on MindSpore's, without a warning. :func:`~mindnlp_dp.kernels.dispatch.choose` turns the
kernels on and off.
"""
