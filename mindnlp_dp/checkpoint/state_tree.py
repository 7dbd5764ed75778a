"""This module packs a state tree for a checkpoint, and unpacks it again; reading and writing of checkpoints call it.

A tree consists of dicts, lists, tuples, numbers, strings, NumPy arrays and MindSpore tensors, such as an optimizer's
``state_dict()``. It is packed into an outline, which JSON can hold, and named arrays, which safetensors can hold.
Nothing else is accepted, so nothing that is read back can run code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindnlp_dp.communication.lazy_arrays import LazyArray, LazyTensor
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.arrays import dtype_name, from_host, to_host
from mindnlp_dp.runtime.sharded_array import FlatLayout, Shard, ShardedArray

# Keys that mark values in the outline for which JSON has no type.
ARRAY, TENSOR, TUPLE, ITEMS, SHARDED = "$array", "$tensor", "$tuple", "$items", "$sharded"
_MARKS = (ARRAY, TENSOR, TUPLE, ITEMS, SHARDED)


@dataclass
class PackedState:
    """A packed tree: ``outline`` is valid JSON, ``arrays`` maps the array names in it to NumPy arrays.

    Arrays of which this rank has only pieces are in ``sharded``.
    """

    outline: Any
    arrays: dict[str, Any] = field(default_factory=dict)
    sharded: dict[str, ShardedArray] = field(default_factory=dict)


def array_names(outline: Any) -> Iterator[str]:
    """Yield the names of the arrays in an outline."""
    if isinstance(outline, list):
        for item in outline:
            yield from array_names(item)
    elif isinstance(outline, dict):
        for key, item in outline.items():
            if key in (ARRAY, TENSOR):
                yield item
            else:
                yield from array_names(item)


def sharded_layouts(outline: Any) -> dict[str, tuple[FlatLayout, str]]:
    """Return the layouts and the types of the sharded arrays in an outline, by name."""
    if isinstance(outline, list):
        return {name: described for item in outline for name, described in sharded_layouts(item).items()}
    if not isinstance(outline, dict):
        return {}
    if SHARDED in outline:
        described = outline[SHARDED]
        shard = Shard(*described["shard"]) if described["shard"] else None
        return {
            outline[TENSOR]: (FlatLayout(tuple(described["shape"]), shard, described["num_shards"]), outline["dtype"])
        }
    return sharded_layouts(list(outline.values()))


def pack_state(tree: Any) -> PackedState:
    """Pack a tree into an outline and arrays; a packed one is returned as it is.

    Raises:
        TypeError: a value in the tree is of an unsupported type; the message says where.
    """
    if isinstance(tree, PackedState):
        return tree
    packed = PackedState(None)
    packed.outline = _pack(tree, "", packed)
    return packed


def _pack(value: Any, path: str, packed: PackedState) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        if all(isinstance(key, str) and key not in _MARKS for key in value):
            return {key: _pack(item, f"{path}/{key}", packed) for key, item in value.items()}
        items = [[_pack(key, path, packed), _pack(item, f"{path}/{key}", packed)] for key, item in value.items()]
        return {ITEMS: items}
    if isinstance(value, (list, tuple)):
        listed = [_pack(item, f"{path}/{index}", packed) for index, item in enumerate(value)]
        return {TUPLE: listed} if isinstance(value, tuple) else listed
    name = path.strip("/") or "value"
    arrays = packed.arrays
    if name in arrays or name in packed.sharded:
        # Different keys may give the same path: "a/b" and nested "a", "b", or 0 and "0".
        name = f"{name}~{len(arrays) + len(packed.sharded)}"
    if isinstance(value, ShardedArray):
        packed.sharded[name], layout = value, value.layout
        shard = None if layout.shard is None else [layout.shard.dim, layout.shard.num_blocks]
        described = {"shape": list(layout.shape), "shard": shard, "num_shards": layout.num_shards}
        return {TENSOR: name, "dtype": value.dtype, SHARDED: described}
    if isinstance(value, np.ndarray) and value.dtype != object:
        arrays[name] = value
        return {ARRAY: name}
    if hasattr(value, "asnumpy"):
        arrays[name] = to_host(value)
        return {TENSOR: name, "dtype": dtype_name(value)}
    raise TypeError(
        f"{name!r} is a {type(value).__name__}, which a checkpoint cannot hold: it takes numbers, texts, lists, dicts, "
        "arrays and tensors, and nothing that could only be read back by running code"
    )


def unpack_state(packed: PackedState) -> Any:
    """Return the original tree; its arrays are those of ``packed``, its tensors are new."""
    return _unpack(packed.outline, packed.arrays)


def _unpack(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if ARRAY in value:
        return arrays[value[ARRAY]]
    if TENSOR in value:
        array = arrays[value[TENSOR]]
        if isinstance(array, LazyArray):
            return LazyTensor(array, value["dtype"])
        return from_host(np.asarray(array), value["dtype"])
    if TUPLE in value:
        return tuple(_unpack(item, arrays) for item in value[TUPLE])
    if ITEMS in value:
        return {_unpack(key, arrays): _unpack(item, arrays) for key, item in value[ITEMS]}
    return {key: _unpack(item, arrays) for key, item in value.items()}


def broadcast_state(packed: PackedState, group: ProcessGroup, later: str = "") -> PackedState:
    """Return rank 0's state on every rank; what the other ranks pass is ignored. A collective, array by array.

    Arrays whose names begin with ``later`` stay on rank 0, as other ranks may need only a part of each; on all ranks an
    :class:`LazyArray` replaces them.
    """
    header = [(name, array.shape, array.dtype) for name, array in packed.arrays.items()]
    outline, header = group.broadcast_object((packed.outline, header))
    arrays: dict[str, Any] = {}
    for name, shape, dtype in header:
        array = LazyArray(group, packed.arrays.get(name), shape, dtype)
        arrays[name] = array if later and name.startswith(later) else array.fetch()
    return PackedState(outline, arrays)
