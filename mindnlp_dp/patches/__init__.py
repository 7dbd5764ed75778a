"""Makes MindNLP run on newer MindSpore, and takes its import-time side effects out.

Goes in: the import of ``mindnlp``. Comes out: the same packages, patched where this pair of versions needs it. Nothing
is patched before ``mindnlp`` is imported, and nothing that works already: each patch looks whether its defect is there.
This is the one folder that changes other people's code.

A patch is a generator: what stands before its ``yield`` runs before the module that it belongs to is executed, what
stands behind runs after. It says which versions it is for, what the cause is, and when it can go.
"""

from mindnlp_dp.versions import mindnlp_series

from . import any_mindnlp as any_mindnlp
from . import cpu_kernels as cpu_kernels

if mindnlp_series() == "0.5":
    from . import mindnlp_0_5 as mindnlp_0_5
else:
    from . import mindnlp_0_4 as mindnlp_0_4
    from . import mindspore_api as mindspore_api
    from . import mindspore_layers as mindspore_layers
from .import_hook import install_import_hook as install_import_hook
