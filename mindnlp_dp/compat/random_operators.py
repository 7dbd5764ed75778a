"""This module makes MindSpore's random operators follow ``mindspore.set_seed`` where they ignore it.

The draws of a training step then depend on its seed only, so a resumed run draws the same numbers again.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Iterator
from typing import Any, Optional

from mindnlp_dp.compat.import_hook import around
from mindnlp_dp.runtime.override import override


# Versions: MindSpore 2.7+ on CPU. Cause: the kernels of these operators take their seed from the clock, unless they are
# created with an explicit seed, which gives the same numbers at every call.
# Remove when: they follow mindspore.set_seed, as ops.rand and ops.dropout do.
@functools.cache
def follow_the_seed() -> None:
    """Make MindSpore's random operators follow the seed in PyNative mode; one that cannot warns once."""
    import mindspore
    from mindspore import ops
    from mindspore.ops import operations
    from mindspore.ops.function.random_func import _get_seed
    from mindspore.ops.operations import math_ops, random_ops

    def next_seeds(name: str) -> Optional[tuple[int, int]]:
        """Return the seeds that MindSpore's own functions would pass to this operator; None if no seed is set."""
        if mindspore.get_seed() is None or mindspore.get_context("device_target") != "CPU":
            return None
        first, second = _get_seed(None, name)
        return (first, second) if first or second else None

    def drop_channels(self: Any, x: Any) -> Any:
        if next_seeds("dropout") is None or self.keep_prob in (0.0, 1.0):
            return NotImplemented
        channels = ops.ones((*x.shape[:2], *(1,) * (x.ndim - 2)), x.dtype)
        kept = ops.dropout(channels, p=1.0 - self.keep_prob, training=True)
        return x * kept, (kept != 0).broadcast_to(x.shape)

    for kind in (operations.Dropout2D, operations.Dropout3D):
        override(kind, "__call__")(drop_channels)

    @override(mindspore.nn.Dropout, "construct")
    def dropout(self: Any, x: Any) -> Any:
        p = 1.0 - self.keep_prob if self.p is None else self.p
        if not self.training or not 0 < p < 1 or next_seeds("dropout") is None:
            return NotImplemented
        return ops.dropout(x, p=p, training=True)

    def with_seeds(self: Any, *args: Any) -> Any:
        seeds = None if self.seed or self.seed2 else next_seeds(self.name)
        return NotImplemented if seeds is None else type(self)(*seeds)(*args)

    for name in ("UniformReal", "UniformInt", "StandardLaplace"):
        override(getattr(random_ops, name), "__call__")(with_seeds)

    @override(math_ops.Bernoulli, "__call__")
    def bernoulli(self: Any, x: Any, p: Any) -> Any:
        seeds = None if self.seed != -1 else next_seeds("Bernoulli")
        return NotImplemented if seeds is None else math_ops.Bernoulli(sum(seeds))(x, p)

    @override(random_ops.RandomCategorical, "__call__")
    def random_categorical(self: Any, logits: Any, num_samples: Any, seed: Any = 0) -> Any:
        seeds = None if seed else next_seeds("RandomCategorical")
        return NotImplemented if seeds is None else self(logits, num_samples, sum(seeds))

    override(random_ops.UniformCandidateSampler, "__call__")(_say_that_it_does_not)


def _say_that_it_does_not(self: Any, *args: Any) -> Any:
    import mindspore

    if not self.seed and mindspore.get_seed() is not None:
        _warn(self.name)
    return NotImplemented


@functools.cache
def _warn(name: str) -> None:
    warnings.warn(
        f"MindSpore's {name} draws numbers that do not follow the seed of the step: a resumed run draws "
        "different ones. Give it its own seed",
        RuntimeWarning,
        stacklevel=4,
    )


@around("mindnlp")
def _random_operators(module: types.ModuleType) -> Iterator[None]:
    follow_the_seed()
    yield
