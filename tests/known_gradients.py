"""Provide parameters with known gradients, and updates with them, for the overlap tests."""

from __future__ import annotations

import threading

import mindspore
import numpy as np
from library import autograd, nn

SHAPES = [(40, 30), (7,), (3, 5, 2), (1,), (64, 64)]


class KnownGradients:
    """Holds parameters, and runs backward passes that give known gradients."""

    def __init__(self, shapes=SHAPES, dtype="float32", frozen=()):
        self.parameters = [
            nn.Parameter(mindspore.Tensor(np.zeros(shape, dtype)), requires_grad=index not in frozen)
            for index, shape in enumerate(shapes)
        ]
        self.trainable = [p for p in self.parameters if p.requires_grad]
        self.dtype = dtype
        # If true, the backward pass finishes the gradients in the opposite order.
        self.is_reversed = False
        self.run = autograd.value_and_grad(self.loss, tuple(self.trainable), attach_grads=True)

    def loss(self, coefficients):
        total = 0
        pairs = list(zip(self.parameters, coefficients))
        for parameter, coefficient in reversed(pairs) if self.is_reversed else pairs:
            total = total + (parameter * coefficient).sum()
        return total

    def coefficients(self, *seed):
        rng = np.random.default_rng(seed)
        return [mindspore.Tensor(rng.standard_normal(p.shape).astype(self.dtype)) for p in self.parameters]

    def backward(self, *seed):
        for parameter in self.trainable:
            parameter.grad = None
        self.run(self.coefficients(*seed))
        return [p.grad for p in self.trainable]


def run_update(sync, micro, rank, number, weights=(1.0,)):
    """Run one update with a micro step for each weight; None: this rank has no such micro-batch."""
    for step, weight in enumerate(weights):
        if weight is None:
            continue
        if step + 1 == len(weights):
            with sync.backward(weight):
                gradients = micro.backward(rank, number, step)
        else:
            gradients = micro.backward(rank, number, step)
        sync.accumulate(gradients, weight)
    return [None if g is None else g.asnumpy().copy() for g in sync.reduce()]


def num_exchange_threads():
    return sum(thread.name == "gradient-exchange" for thread in threading.enumerate())
