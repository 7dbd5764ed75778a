"""Exchanges tokens for attention heads, and back, among the ranks of the axis "sp".

sequence_edits.py puts these operators into models.

Outside of attention a rank has some tokens of each row; in attention it has all tokens, and some of the heads. Two
all-to-alls are between them (Jacobs et al., DeepSpeed Ulysses, 2023)::

    (batch, my tokens, all heads) ── to_heads ── (batch, all tokens, my heads) ── to_tokens ── (batch, my tokens, ...)

The losses of all ranks are the same number. So that their gradients are right, every operator here is differentiated as
a part of the sum of the ranks' losses; the exchange of gradients divides by their number (``loss_replication``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mindspore import Tensor, ops

from mindnlp_dp.communication.autograd_ops import all_gather, all_to_all
from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.runtime.random_state import SampleShard, ShardOf, rank_local_rng
from mindnlp_dp.runtime.shard_bounds import shard_bounds


class SequenceShards:
    """Which tokens of each row every rank has, in the current forward pass.

    Attributes:
        group: the ranks of the axis "sp".
        bounds: rank r has the tokens ``bounds[r]`` to ``bounds[r + 1]``; their numbers differ by one at most.
        has_local_logits: whether the output layer computes the logits of this rank's tokens only.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.bounds = [0] * (group.world_size + 1)
        self.has_local_logits = False

    def begin(self, length: int) -> None:
        """Split rows of ``length`` tokens; raise ValueError if a rank would get none."""
        if length < self.group.world_size:
            least = self.group.world_size
            raise ValueError(
                f"sp={least} needs rows of at least {least} tokens, got a batch of length {length} (rank "
                f"{self.group.label()}); pad batches to a longer length, use a smaller sp, and generate text on one "
                "process"
            )
        self.bounds = shard_bounds(length, self.group.world_size)

    @contextlib.contextmanager
    def local_logits(self) -> Iterator[None]:
        """Compute the logits of this rank's tokens only in this block."""
        self.has_local_logits = True
        try:
            yield
        finally:
            self.has_local_logits = False

    @property
    def length(self) -> int:
        """The number of tokens of a row on all ranks."""
        return self.bounds[-1]

    @property
    def _lengths(self) -> list[int]:
        return [last - first for first, last in zip(self.bounds, self.bounds[1:])]

    def split(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of ``x`` (batch, all tokens, ...), which is equal on all ranks."""
        first, last = self.bounds[self.group.rank :][:2]
        return x.narrow(1, first, last - first)

    def gather(self, x: Tensor) -> Tensor:
        """Return the tokens of all ranks, of ``x`` (batch, my tokens, ...)."""
        return all_gather(x, self.group, 1)

    def to_heads(self, x: Tensor, num_blocks: int = 1, copies: int = 1) -> Tensor:
        """Return (batch, all tokens, width / N), this rank's heads, of ``x`` (batch, my tokens, width).

        Args:
            x: queries, keys or values, by heads.
            num_blocks: the number of blocks that are each split by heads, such as queries, keys and values.
            copies: how often each of the N / ``copies`` heads of ``x`` is sent, if there are fewer heads than ranks.
        """
        n, (batch, tokens, _) = self.group.world_size, x.shape
        if tokens != self._lengths[self.group.rank]:
            raise ValueError(
                f"a projection of attention has {tokens} tokens, and rank {self.group.label()} has "
                f"{self._lengths[self.group.rank]} of {self.length}: with two forward passes of other lengths, call "
                "backward() after each, or do not recompute layers"
            )
        if copies > 1:
            heads = x.reshape(batch, tokens, n // copies, 1, -1)
            x = ops.cat([heads] * copies, 3)
        x = x.reshape(batch, tokens, num_blocks, n, -1).permute(3, 0, 1, 2, 4)
        mine = x.shape[3] * x.shape[4]
        received = all_to_all(
            x.reshape(n * batch * tokens, mine),
            self.group,
            [batch * tokens] * n,
            [batch * each for each in self._lengths],
        )
        parts = ops.split(received, [batch * each for each in self._lengths])
        return ops.cat([part.reshape(batch, -1, mine) for part in parts], 1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Return (batch, my tokens, N * width), all heads, of ``x`` (batch, all tokens, width), this rank's heads."""
        n, (batch, _, width) = self.group.world_size, x.shape
        tokens = self._lengths[self.group.rank]
        rows = ops.cat([part.reshape(-1, width) for part in ops.split(x, self._lengths, 1)])
        received = all_to_all(rows, self.group, [batch * each for each in self._lengths], [batch * tokens] * n)
        return received.reshape(n, batch, tokens, width).permute(1, 2, 0, 3).reshape(batch, tokens, n * width)

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which dropout masks are those of this rank's tokens."""
        first, last = self.bounds[self.group.rank :][:2]
        return rank_local_rng(self.group.rank, SampleShard(first, last, self.length, ShardOf.TOKENS))
