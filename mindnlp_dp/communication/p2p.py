"""This module sends tensors between pipeline stages while both ranks continue to compute.

Sends are asynchronous. A message is an array and a number. Where the transport knows tags, a tag for each micro-batch
and direction keeps messages apart in whatever order they arrive; elsewhere both ranks issue them in one order
(pipeline_parallel/p2p.py).
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from mindnlp_dp.communication.consistency_checks import described_by, message_header
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.arrays import from_host, to_host
from mindnlp_dp.runtime.heartbeat import waiting

# The two kinds of messages: ACTIVATIONS go to the next stage; GRADIENTS, with the loss, to the previous one.
ACTIVATIONS, GRADIENTS = 0, 1

_HEADER_NUMEL = message_header(None).size

# All PipelineP2P objects of a group count updates together: a later one must not receive an earlier one's messages.
_updates_begun: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


class PipelineP2P:
    """Sends and receives pipeline messages between the ranks of ``group``.

    Attributes:
        bytes_sent: bytes of the arrays sent so far, without headers.
        is_in_order: whether the transport ignores tags, and matches messages in the order in which they are issued.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._transport = group._transport
        self.is_in_order = self._transport.matches_in_order
        self._label = group.label
        self._under_way: list[tuple[Any, Any]] = []
        self._left: list[tuple[Any, Any]] = []
        self._group = group
        self.bytes_sent = 0

    @property
    def _update(self) -> int:
        return _updates_begun.get(self._group, 0)

    def begin(self) -> None:
        """Begin a new update, on all ranks; messages of earlier, failed updates are then discarded, if there are tags.

        Where messages are matched in order, a failed update leaves messages that no rank can discard: the caller ends.
        """
        _updates_begun[self._group] = self._update + 1

    def send(self, x: Any, dst: int, number: int, direction: int, note: float = 0.0) -> None:
        """Begin to send ``x`` of micro-batch ``number`` to rank ``dst``, together with the number ``note``."""
        header = np.concatenate([message_header(x).astype(np.float64), [note, self._update]])
        for tag, part in enumerate((header, x)):
            native = self._transport.to_native(part)
            handle = self._transport.begin_send(native, dst, 4 * number + 2 * direction + tag)
            self._under_way.append((handle, native))
        self.bytes_sent += x.nbytes

    def send_abort(self, dst: int, number: int, direction: int) -> None:
        """Send an abort in place of a message: rank ``dst`` raises an error when it receives this message."""
        header = np.concatenate([message_header(None).astype(np.float64), [0.0, self._update]])
        native = self._transport.to_native(header)
        handle = self._transport.begin_send(native, dst, 4 * number + 2 * direction)
        self._under_way.append((handle, native))

    def receive(self, src: int, number: int, direction: int) -> tuple[Any, float]:
        """Return the tensor of micro-batch ``number`` that rank ``src`` sent, and the number sent with it."""
        with waiting(f"a message from rank {self._label(src)}"):
            return self._receive(src, number, direction)

    def _receive(self, src: int, number: int, direction: int) -> tuple[Any, float]:
        tag = 4 * number + 2 * direction
        like = self._transport.to_native(np.zeros(_HEADER_NUMEL + 2, np.float64))
        while True:
            header = to_host(self._transport.recv(like, src, tag))
            is_of_now = header[-1] == self._update
            if header[0] < 0 and not is_of_now:
                continue
            shape, dtype = described_by(header[:-2].astype(np.int64), self._label(src))
            tensor = from_host(np.zeros(shape, np.float32), dtype)
            received = self._transport.recv(self._transport.to_native(tensor), src, tag + 1)
            if is_of_now:
                return self._transport.from_native(received, tensor), float(header[-2])

    def wait(self) -> None:
        """Wait until all sends that were begun are complete."""
        with waiting("the end of its messages"):
            for handle, _ in self._under_way:
                if handle is not None:
                    handle.wait()
        self._under_way.clear()

    def abandon(self) -> None:
        """Abandon unfinished sends after a failure: no rank may receive them, so do not wait. Their memory is kept."""
        self._left += self._under_way
        self._under_way = []
