"""This module compresses gradients with PowerSGD and error feedback, for the gradient synchronizer.

Two small exchanges replace a large one. They give every rank the same low-rank approximation of the mean of the ranks'
gradient matrices. Each rank adds the error of the approximation to its next gradient::

    M = gradient + error      n x m
    P = M Q                   n x r   ── mean over the ranks ──▶ orthonormal columns
    Q = M' P                  m x r   ── mean over the ranks ──▶ Q, where the next step begins
    result = P Q'                     error = M - P (M' P)'

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization",
NeurIPS 2019, algorithms 1 and 2. The computation uses NumPy on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.transports.channel import Channel
from mindnlp_dp.data_parallel.buckets.bucket import Bucket
from mindnlp_dp.data_parallel.buckets.bucket_factory import make_buckets
from mindnlp_dp.data_parallel.buckets.bucket_layout import BucketLayout, Slot
from mindnlp_dp.runtime.arrays import from_host, to_host

DEFAULT_RANK = 4

# A matrix is compressed only if its factors are smaller than the matrix by more than this ratio.
_WORTH_IT = 2

_SEED = 20190531


def is_compressed(shape: Sequence[int], dtype: str, rank: int) -> bool:
    """Return whether a gradient is compressed: it is float32, and its factors have less than half of its elements.

    >>> [is_compressed(shape, "float32", rank=4) for shape in [(1000, 100), (768,), (8, 8)]]
    [True, False, False]
    """
    if dtype != "float32" or len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return _WORTH_IT * rank * (rows + columns) < rows * columns


class PowerSGD:
    """Averages the compressed gradients of a synchronizer, by parameter index, and keeps their bases and errors.

    Attributes:
        num_bytes: This rank's bytes of factors given to the exchange so far.
        num_calls: This rank's collective calls so far.
    """

    def __init__(self, shapes: dict[int, tuple[int, ...]], rank: int, group: ProcessGroup, channel: Channel) -> None:
        self._shapes = {index: (shape[0], math.prod(shape[1:])) for index, shape in shapes.items()}
        self._full_shapes = shapes
        self._rank = rank
        self._group = group
        self._channel = channel
        self._sums: dict[int, np.ndarray] = {}
        self.num_bytes = 0
        self.num_calls = 0
        self._left = self._bucket(0)
        self._right = self._bucket(1)
        self.forget()

    def __contains__(self, index: int) -> bool:
        return index in self._shapes

    def _bucket(self, side: int) -> Bucket:
        slots, offset = [], 0
        for index, shape in self._shapes.items():
            slots.append(Slot(index, offset, (shape[side], self._rank)))
            offset += slots[-1].numel
        (bucket,) = make_buckets([BucketLayout("float32", tuple(slots))], self._group, self._channel)
        return bucket

    def forget(self) -> None:
        """Reset bases and errors to the state of a new object; must be called on every rank."""
        self._bases = {index: self._first_basis(index) for index in self._shapes}
        self._errors: dict[int, np.ndarray] = {}

    def _first_basis(self, index: int) -> np.ndarray:
        rng = np.random.default_rng([_SEED, index])
        return rng.standard_normal((self._shapes[index][1], self._rank)).astype(np.float32)

    def put(self, index: int, gradient: Any, loss_weight: float) -> None:
        host = to_host(gradient).reshape(self._shapes[index])
        weighted = np.multiply(host, loss_weight, dtype=np.float32)
        if index in self._sums:
            self._sums[index] += weighted
        else:
            self._sums[index] = weighted

    def exchange(self, used: np.ndarray, scale: float) -> dict[int, Any]:
        """Return the approximated means of the matrices that any rank used. A collective."""
        indices = [index for index in self._shapes if used[index]]
        # The unweighted mean over the ranks must be the weighted mean, so each rank's term is scaled by the world size.
        factor, matrices = np.float32(scale * self._group.world_size), {}
        for index in indices:
            matrix = self._sums.pop(index, None)
            matrix = np.zeros(self._shapes[index], np.float32) if matrix is None else matrix * factor
            error = self._errors.get(index)
            matrices[index] = matrix if error is None else np.add(matrix, error, out=matrix)
        lefts = self._mean(self._left, {index: matrix @ self._bases[index] for index, matrix in matrices.items()})
        bases = {index: np.linalg.qr(left)[0].astype(np.float32) for index, left in lefts.items()}
        mine = {index: matrix.T @ bases[index] for index, matrix in matrices.items()}
        means = self._mean(self._right, mine)
        results = {}
        for index, matrix in matrices.items():
            if np.isfinite(means[index]).all():
                self._bases[index] = means[index]
                self._errors[index] = np.subtract(matrix, bases[index] @ mine[index].T, out=matrix)
            else:
                # Every rank resets its state, because NaN or infinity must not return in the next step.
                self._bases[index] = self._first_basis(index)
                self._errors.pop(index, None)
            mean = (bases[index] @ means[index].T).reshape(self._full_shapes[index])
            results[index] = from_host(mean, "float32")
        return results

    def _mean(self, bucket: Bucket, factors: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        import mindspore

        for index, matrix in factors.items():
            bucket.put(index, mindspore.Tensor(np.ascontiguousarray(matrix)), 1.0)
        bucket.start(1.0 / self._group.world_size)
        bucket.wait()
        means = {index: to_host(bucket.get(index)).copy() for index in factors}
        bucket.release()
        bucket.clear()
        self.num_bytes += bucket.layout.num_bytes
        self.num_calls += 1
        return means

    def clear(self) -> None:
        self._sums.clear()


def check_powersgd_rank(rank: Optional[int]) -> int:
    """Return the rank of the approximation; raise ValueError if it is not valid."""
    if rank is None or rank < 1:
        raise ValueError(f"powersgd_rank must be at least 1, got {rank}; 1 to 4 are usual")
    return rank
