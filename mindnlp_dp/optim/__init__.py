"""This package runs the optimizer update after the exchange of gradients: replicated, or sharded as ZeRO 1 and 2.

It computes new weights from the sums in the buckets. The weights are bitwise identical on every rank, for any number of
ranks and any split of the work::

    buckets ── squares of own blocks ── norm ── own slices scaled ── rule ── weights ── barrier, or gather
            (fused/block_sums.py)  one small  (flat_updater.py) (fused/rules.py) (fused/flat_weights.py)
                                   all-reduce                   its state: zero/state_registry.py

``zero_stage`` (updater_factory.py) sets which rank updates what, after Rajbhandari, Rasley, Ruwase and He, "ZeRO:
memory optimizations toward training trillion parameter models", 2020. Stage 0: every rank updates everything. Stage 1:
each rank updates one slice, and only it has the optimizer state of this slice. Stage 2: it also gets only this slice of
the gradients. CPU ranks of one host that shard the update share one set of weights, and send nothing. Optimizers that
have no rule here run on full parameters (zero/parameterwise.py).

The package also has Muon, and optimizers for large batches, LARS and LAMB, with the interface of MindNLP's, and rules
for the learning rate. They are imported at first use, because importing MindNLP's optimizers takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "LAMB": "trust_ratio",
    "LARS": "trust_ratio",
    "Muon": "muon",
    "muon_groups": "muon",
    "parameter_groups": "parameter_groups",
    "scaled_learning_rate": "learning_rate",
    "warmup_factor": "learning_rate",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from mindnlp_dp.optim.learning_rate import scaled_learning_rate as scaled_learning_rate
    from mindnlp_dp.optim.learning_rate import warmup_factor as warmup_factor
    from mindnlp_dp.optim.muon import Muon as Muon
    from mindnlp_dp.optim.muon import muon_groups as muon_groups
    from mindnlp_dp.optim.parameter_groups import parameter_groups as parameter_groups
    from mindnlp_dp.optim.trust_ratio import LAMB as LAMB
    from mindnlp_dp.optim.trust_ratio import LARS as LARS
else:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
