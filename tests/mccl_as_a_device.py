"""Let ranks of MindSpore's CPU library exchange as ranks with devices do, for the parallel tests.

The library lacks a reduce-scatter and an all-gather of one tensor; they are emulated with others. The result of an
all-gather that was begun is NaN until its handle's ``wait()``, as on a device (comm_handle.cc, ``CommHandle::Wait``).
"""

from __future__ import annotations

import mindspore
import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.transports.mindspore.mindspore_transport import MindSporeChannel
from mindnlp_dp.parallel import mixed_precision


class Handle:
    def __init__(self, out, total, waited):
        self._out, self._total, self._waited = out, total, waited

    def wait(self):
        self._out.assign_value(self._total)
        self._waited()


def emulate_collectives(monkeypatch):
    """Emulate the collectives; return how often each was called, waits for gathers and their types included."""
    counts = {"scatter": 0, "gather": 0, "waits": 0, "types": set()}

    def reduce_scatter_async(self, x):
        counts["scatter"] += 1
        length, rest = divmod(x.shape[0], self.world_size)
        assert not rest
        counts["types"].add(("scatter", x.dtype))
        return self.sum(x)[self.slice_index * length : (self.slice_index + 1) * length].copy(), None

    def all_gather_flat_async(self, x):
        counts["gather"] += 1
        counts["types"].add(("gather", x.dtype))
        is_half = x.dtype in (mindspore.bfloat16, mindspore.float16)
        # float32 has all values of the 16-bit types.
        wide = x.astype(mindspore.float32) if is_half else x
        total = mindspore.ops.cat(self._transport.calls.all_gather(wide, self.world_size)).astype(x.dtype)
        out = mindspore.Tensor(np.full(tuple(total.shape), np.nan, np.float32)).astype(x.dtype)

        def waited():
            counts["waits"] += 1

        return out, Handle(out, total, waited)

    def all_gather_flat(self, x):
        out, handle = all_gather_flat_async(self, x)
        handle.wait()
        return out

    for function in (reduce_scatter_async, all_gather_flat_async, all_gather_flat):
        monkeypatch.setattr(MindSporeChannel, function.__name__, function)
    return counts


def act_as_a_device(monkeypatch):
    """Emulate the collectives, and let groups say that their arrays are on a device; return the counts."""
    monkeypatch.setattr(mixed_precision, "is_on_cpu", lambda: False)
    monkeypatch.setattr(ProcessGroup, "on_device", property(lambda self: self.backend == "mccl"))
    return emulate_collectives(monkeypatch)
