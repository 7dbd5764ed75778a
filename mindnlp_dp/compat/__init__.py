"""This package makes MindNLP run on newer versions of MindSpore, and removes the side effects of importing it.

The patches are applied when ``mindnlp`` is imported, where the installed versions need them; each patch checks that its
defect is present. This is the only package that changes other libraries' code.

A patch is a generator for one module: the code before its ``yield`` runs before that module is executed, the code after
it runs afterwards. A comment names the versions that need the patch, the cause, and the condition for its removal.

Read import_hook.py first; then the folder of one version of MindNLP, mindnlp_0_4/ or mindnlp_0_5/, where start.py
makes it importable and stock_trainer.py fixes its Trainer. The modules beside these folders patch both versions, or
MindSpore.
"""

from mindnlp_dp.compat import common as common
from mindnlp_dp.compat import gradient_checkpointing as gradient_checkpointing
from mindnlp_dp.compat import resized_embeddings as resized_embeddings
from mindnlp_dp.compat import router_losses as router_losses
from mindnlp_dp.compat import shared_cpu_kernels as shared_cpu_kernels
from mindnlp_dp.compat.import_hook import install_import_hook as install_import_hook
from mindnlp_dp.runtime.versions import mindnlp_series

if mindnlp_series() == "0.5":
    from mindnlp_dp.compat import mindnlp_0_5 as mindnlp_0_5
else:
    from mindnlp_dp.compat import mindnlp_0_4 as mindnlp_0_4
    from mindnlp_dp.compat import mindspore_api as mindspore_api
    from mindnlp_dp.compat import mindspore_layers as mindspore_layers
