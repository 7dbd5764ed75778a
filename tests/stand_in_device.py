"""Simulate a device of two ranks with CPU tensors, and count the calls that a process makes, for the unit tests.

Every call to MindSpore's communication must match the signature in the installed MindSpore, and is refused if its
documentation does not name the device. Types and layouts that a version of MindSpore or a chip refuses are refused
here, too. This process is rank 0; the simulated rank 1 has the same tensors.

The device is lazy, as MindSpore's streams are:

- The result of an asynchronous collective is NaN until ``wait()``, which makes the stream of the operators wait for
  that of communication (MindSpore 2.7, ``CommHandle::Wait`` in comm_handle.cc): operators that run after it see the
  sum, operators that ran before it do not.
- An error of a collective or an operator (:meth:`StandInDevice.fail`) is raised by the next host read, which waits for
  all streams (MindSpore 2.7, ``AscendDeviceAddress::SyncStream``), and not by the call.

With ``is_deterministic=False``, sums may have other last bits each time (``mindspore.set_deterministic``: "the same
output is generated if an operator is executed multiple times" in that mode only).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
import threading

import mindspore
import numpy as np
from mindspore import _c_expression, communication, ops
from mindspore.communication.comm_func import CommHandle
from mindspore.mint import distributed

MOVED = {
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "bfloat16",
}  # fmt: skip

# Which types each chip can reduce: CANN's manual, HcclAllReduce and HcclReduceScatter (8.0 to 8.5). Of the types that
# MindSpore checks before (op_comm_func_impl.cc, CheckReduceInferType), the Atlas A2 has all.
REDUCED = {
    "ascend910b": {"int8", "int16", "int32", "int64", "float16", "float32", "bfloat16"},
    "ascend910": {"int8", "int32", "int64", "float16", "float32"},
    "ascend310p": {"int8", "int16", "int32", "float16", "float32"},
}

# Calls whose types MindSpore checks before it starts them (the InferType of DistCommAllGather,
# DistCommAllGatherIntoTensor, DistCommIrecv and DistCommAllToAllVSingle). 2.7.0 refuses bool there
# (op_comm_func_impl.cc, CheckInferType); 2.10.0 accepts it; 2.8 and 2.9, which were not read, are taken to refuse it.
# DistCommBroadcast and DistCommIsend have no such check, and hcom_util.h moves bool as int8.
CHECKED = ("all_gather", "all_gather_into_tensor", "recv", "all_to_all_single")


def hccl_types(call, version, chip):
    """Return the types that a call of ``mint.distributed`` accepts in a version of MindSpore on a chip."""
    if call in ("all_reduce", "reduce_scatter_tensor"):
        return REDUCED[chip]
    # CANN's manual, HcclSend and HcclRecv: not for the Atlas inference series, which is the 310P.
    if call in ("send", "isend", "recv") and chip == "ascend310p":
        return set()
    # HcclAllGather, HcclBroadcast, HcclAlltoAllV, HcclSend: bfp16 is for the Atlas A2 and later only.
    moved = MOVED if chip == "ascend910b" else MOVED - {"bfloat16"}
    refuses_bool = call in CHECKED and version < (2, 10)
    return moved if refuses_bool else moved | {"bool"}


# The types for which MindSpore's NCCL kernels are registered.
NCCL_TYPES = ("bool", "int8", "int32", "int64", "uint8", "uint32", "uint64", "float16", "float32")
HOST_READS = ("asnumpy", "item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__array__")
METHODS = (
    "astype", "to", "reshape", "view", "copy", "clone", "contiguous", "split", "narrow", "__getitem__",
    "__add__", "__radd__", "__mul__", "__rmul__", "__truediv__",
)  # fmt: skip
FUNCTIONS = ("cat", "concat", "stack", "zeros", "split", "deepcopy")


def bound(real, play):
    """Return a function that checks its arguments against ``real``, and passes them by name to ``play``."""
    signature = inspect.signature(real)

    def call(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        return play(**arguments.arguments)

    return call


def platforms(real):
    """Return the devices that MindSpore's documentation names for a function."""
    return re.findall(r"``(\w+)``", re.search(r"Supported Platforms:\s*\n(.*)", inspect.getdoc(real)).group(1))


def inputs_of(primitive):
    section = re.search(r"Inputs:(.*?)(Outputs|Raises):", inspect.getdoc(primitive), re.DOTALL)
    return re.findall(r"\*\*(\w+)\*\* \(", section.group(1)) if section else []


class Handle:
    """Handle of an asynchronous collective, which takes effect only when the caller waits for it."""

    def __init__(self, end):
        self._end = end
        # Only the methods that the real handle has.
        self.wait = bound(lambda: CommHandle.wait, self._wait)

    def _wait(self):
        self._end()
        self._end = lambda: None


class ContextOfChip:
    """Replaces MindSpore's MSContext, and says that the device is this chip (ms_context.cc, ascend_soc_version)."""

    def __init__(self, chip):
        self._real = _c_expression.MSContext
        self.get_ascend_soc_version = lambda: chip

    def get_instance(self):
        return self

    def __getattr__(self, name):
        return getattr(self._real.get_instance(), name)


class StandInDevice:
    """Replaces MindSpore's communication by a simulated one; ``target`` is "Ascend" or "GPU".

    ``version`` is that of the MindSpore whose checks of types are simulated. ``chip`` is the name that MindSpore gives
    to an NPU: "ascend910b", "ascend910" (the 910A) or "ascend310p".

    Attributes:
        calls: names of the collectives and messages that were started.
        types: types of their tensors.
        groups: ranks of the communicators that were created, by name.
        chip: name of the chip; empty for a GPU.
    """

    def __init__(self, monkeypatch, target, *, version=(2, 10), chip="ascend910b", is_deterministic=True):
        self.calls, self.types, self.groups = [], [], {}
        self._sent = []
        self._error = None
        self._read_lazily(monkeypatch)
        if not is_deterministic:
            self._sum_in_any_order(monkeypatch)
        self.chip = chip if target == "Ascend" else ""
        self._target, self._version = target, version
        monkeypatch.setattr(_c_expression, "MSContext", ContextOfChip(self.chip))
        monkeypatch.setattr(mindspore, "get_context", bound(mindspore.get_context, lambda attr_key: target))
        for name, number in (("rank", 0), ("group_size", 2), ("local_rank", 0), ("local_rank_size", 2)):
            real = getattr(communication, f"get_{name}")
            monkeypatch.setattr(communication, f"get_{name}", self._stand_in(real, lambda group, n=number: n))
        # Without device="CPU", MindSpore would make these tensors on the simulated device (2.7 always does: on Ascend).
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(mindspore.mint, name, functools.partial(getattr(mindspore.mint, name), device="CPU"))
        # mint.clone has no CPU kernel.
        monkeypatch.setattr(mindspore.mint, "clone", bound(mindspore.mint.clone, _cloned))
        monkeypatch.setattr(mindspore.runtime, "synchronize", self._synchronized)
        for name in ("init", "release", "destroy_group"):
            monkeypatch.setattr(communication, name, self._stand_in(getattr(communication, name), lambda **_: None))
        create_group = self._stand_in(communication.create_group, self._create_group)
        monkeypatch.setattr(communication, "create_group", create_group)
        for name in (
            "all_reduce", "broadcast", "all_gather", "send", "isend", "recv", "reduce_scatter_tensor",
            "all_gather_into_tensor", "all_to_all_single",
        ):  # fmt: skip
            play = self._strict(name, self._noted(name, getattr(self, f"_{name}")))
            monkeypatch.setattr(distributed, name, self._stand_in(getattr(distributed, name), play))
        primitives = {
            "AllReduce": self._reduced_anew,
            "AllGather": lambda x, group: ops.cat((x, x)),
            "ReduceScatter": lambda x, op, group: _reduced(x, op)[: len(x) // 2],
            "Broadcast": lambda xs, root_rank, group: tuple(x.copy() for x in xs),
            "Send": lambda x, **_: self._sent.append(x.copy()),
            "Receive": self._received_anew,
            # MindSpore documents it for Ascend only.
            "AlltoAllV": None,
        }
        for name, play in primitives.items():
            monkeypatch.setattr(ops, name, self._primitive(getattr(ops, name), play))

    def _stand_in(self, real, play):
        def refuse(**_):
            raise AssertionError(f"{real.__name__} is documented for {platforms(real)}, not for {self._target}")

        return bound(real, play if self._target in platforms(real) else refuse)

    def _create_group(self, group, rank_ids, options=None):
        self.groups[group] = list(rank_ids)

    def _strict(self, name, play):
        """Refuse the tensors that ``name`` of ``mint.distributed`` refuses on this chip, in this version."""

        def call(**arguments):
            lists = [given if isinstance(given, list) else [given] for given in arguments.values()]
            for x in (x for given in lists for x in given if isinstance(x, mindspore.Tensor)):
                dtype = str(x.dtype).lower().rpartition(".")[2].rstrip("_")
                if dtype not in hccl_types(name, self._version, self.chip):
                    version = ".".join(map(str, self._version))
                    raise TypeError(f"{name} of {dtype}: MindSpore {version} on {self.chip} refuses it")
                # comm_common.cc, GetDevicePtrFromTensor, from which every call takes the memory of its tensors.
                if not x.is_contiguous():
                    raise ValueError(f"{name} does not support not-contiguous tensor")
                # No source says that an empty tensor has an address on a device.
                assert x.size > 0, f"{name} of an empty tensor of shape {x.shape}"
            return play(**arguments)

        return call

    def _noted(self, name, play):
        def call(*args, **kwargs):
            self.calls.append(name)
            self.types += [x.dtype for x in (*args, *kwargs.values()) if isinstance(x, mindspore.Tensor)]
            return play(*args, **kwargs)

        return call

    def _primitive(self, real, play):
        def make(**arguments):
            # The real primitive checks its arguments.
            real(**arguments)

            def call(*inputs):
                assert len(inputs) == len(inputs_of(real)), f"{real.__name__} takes {inputs_of(real)}"
                for x in (x for given in inputs for x in (given if isinstance(given, tuple) else (given,))):
                    assert str(x.dtype).lower().rpartition(".")[2] in NCCL_TYPES, f"{real.__name__} of {x.dtype}"
                return self._noted(real.__name__, play)(*inputs, **arguments)

            return call

        return self._stand_in(real, make)

    def _synchronized(self):
        self.calls.append("synchronize")
        self._raise()

    # Laziness, and sums that are not deterministic.

    def fail(self, message):
        """Let what is launched next fail: the next host read, or synchronization, raises RuntimeError."""
        self._error = message

    def _raise(self):
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(error)

    def _read_lazily(self, monkeypatch):
        for name in HOST_READS:
            real = getattr(mindspore.Tensor, name)

            def read(tensor, *args, _real=real, **kwargs):
                self._raise()
                return _real(tensor, *args, **kwargs)

            monkeypatch.setattr(mindspore.Tensor, name, read)

    def _sum_in_any_order(self, monkeypatch):
        real, count = mindspore.Tensor.sum, itertools.count()

        def summed(tensor, *args, **kwargs):
            total = real(tensor, *args, **kwargs)
            is_other = total.dtype == mindspore.float32 and next(count) % 3 == 1
            return total * mindspore.Tensor(np.nextafter(np.float32(1), np.float32(2))) if is_other else total

        monkeypatch.setattr(mindspore.Tensor, "sum", summed)

    # Functions of mint, which work in place.

    def _all_reduce(self, tensor, op, group, async_op):
        total = _reduced(tensor, op)

        def end():
            tensor.assign_value(total)

        if not async_op:
            return end()
        _spoil(tensor)
        return Handle(end)

    def _broadcast(self, tensor, src, group, async_op):
        """Do nothing: the other rank has the same tensor."""

    def _all_gather(self, tensor_list, tensor, group, async_op):
        assert len(tensor_list) == 2
        for out in tensor_list:
            assert (out.dtype, out.shape) == (tensor.dtype, tensor.shape)
            out.assign_value(tensor)

    def _reduce_scatter_tensor(self, output, input, op, group, async_op):
        assert (2 * output.shape[0], output.dtype) == (input.shape[0], input.dtype)

        total = _reduced(input, op)[: len(output)].copy()

        def end():
            output.assign_value(total)

        if not async_op:
            return end()
        _spoil(output)
        return Handle(end)

    def _all_gather_into_tensor(self, output_tensor, input_tensor, group, async_op):
        assert (output_tensor.shape[0], output_tensor.dtype) == (2 * input_tensor.shape[0], input_tensor.dtype)
        total = ops.cat((input_tensor, input_tensor))

        def end():
            output_tensor.assign_value(total)

        if not async_op:
            return end()
        _spoil(output_tensor)
        return Handle(end)

    def _all_to_all_single(self, output, input, output_split_sizes, input_split_sizes, **_):
        first = input_split_sizes[0]
        assert output_split_sizes == [first, first], "the simulated rank 1 sends as many rows as this rank does"
        assert len(input) >= sum(input_split_sizes)
        if first:
            output.assign_value(ops.cat((input[:first], input[:first])))

    def _send(self, tensor, dst, group, tag):
        self._sent.append(tensor.copy())

    def _isend(self, tensor, dst, group, tag):
        self._sent.append(tensor.copy())
        return Handle(lambda: None)

    def _recv(self, tensor, src, group, tag):
        tensor.assign_value(self._sent.pop(0))
        return 0

    # Primitives, which return new tensors.

    def _reduced_anew(self, x, op, group):
        return _reduced(x, op)

    def _received_anew(self, shape, dtype, **_):
        received = self._sent.pop(0)
        assert (list(received.shape), received.dtype) == (shape, dtype)
        return received


def _spoil(tensor):
    """Overwrite a tensor with NaN until its stream has the result; integers have none."""
    if tensor.dtype in (mindspore.float64, mindspore.float32, mindspore.float16, mindspore.bfloat16):
        nans = mindspore.Tensor(np.full(tuple(tensor.shape), np.nan, np.float32))
        tensor.assign_value(nans.astype(tensor.dtype))


def _cloned(input):
    return input.copy() if input.dtype == mindspore.bfloat16 else ops.deepcopy(input)


def _reduced(x, op):
    assert op in ("sum", "prod", "min", "max")
    # MindSpore cannot add half precision types on the CPU.
    is_half = x.dtype in (mindspore.float16, mindspore.bfloat16)
    wide = x.astype(mindspore.float32) if is_half else x
    return (wide + wide if op == "sum" else wide).astype(x.dtype)


@contextlib.contextmanager
def counted(owner, names):
    """Record the names of the methods of ``owner`` that this thread calls, in order, without nested calls."""
    me, depth, calls = threading.get_ident(), 0, []

    def counting(name, real):
        def call(*args, **kwargs):
            nonlocal depth
            if threading.get_ident() != me:
                return real(*args, **kwargs)
            if depth == 0:
                calls.append(name)
            depth += 1
            try:
                return real(*args, **kwargs)
            finally:
                depth -= 1

        return call

    originals = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    was_own = {name for name in originals if name in vars(owner)}
    try:
        for name, real in originals.items():
            setattr(owner, name, counting(name, real))
        yield calls
    finally:
        for name, real in originals.items():
            if name in was_own:
                setattr(owner, name, real)
            else:
                delattr(owner, name)


@contextlib.contextmanager
def counted_host_reads():
    """Record the calls that wait for the device because they read values on the host."""
    with counted(mindspore.Tensor, HOST_READS) as calls:
        yield calls


@contextlib.contextmanager
def counted_operators():
    with counted(mindspore.Tensor, METHODS) as methods, counted(ops, FUNCTIONS) as functions:
        yield methods, functions
