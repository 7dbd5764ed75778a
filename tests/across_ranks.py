"""Models that look at the whole batch, batch normalization and in-batch negatives, and data for them."""

from __future__ import annotations

import mindspore
import numpy as np
from library import nn

import mindnlp_dp as dp
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api

F = mindnlp_api().nn.functional
NUM_CHANNELS, WIDTH = 4, 5


class Images:
    """Random images and classes; the means of the ranks' batches differ much."""

    def __init__(self, num_samples):
        rng = np.random.default_rng(0)
        scale = rng.uniform(0.1, 5, (num_samples, 1, 1, 1))
        self.pixels = (rng.normal(1, 1, (num_samples, 2, WIDTH, WIDTH)) * scale).astype(np.float32)
        self.labels = rng.integers(0, 3, num_samples)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"pixels": self.pixels[index], "labels": int(self.labels[index])}


class ConvNet(nn.Module):
    """A convolution with batch normalization, and a linear layer with another one."""

    def __init__(self, affine=True, momentum=0.1):
        super().__init__()
        self.conv = nn.Conv2d(2, NUM_CHANNELS, 3)
        self.norm = nn.BatchNorm2d(NUM_CHANNELS, affine=affine, momentum=momentum)
        self.hidden = nn.Linear(NUM_CHANNELS, 6)
        self.norm_of_rows = nn.BatchNorm1d(6, affine=affine, momentum=momentum)
        self.out = nn.Linear(6, 3)
        rng = np.random.default_rng(5)
        for name, parameter in self.named_parameters():
            center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            values = rng.normal(center, 0.3, parameter.shape).astype(np.float32)
            parameter.assign_value(mindspore.Tensor(values))

    def forward(self, pixels, labels):
        x = F.relu(self.norm(self.conv(pixels))).mean((2, 3))
        logits = self.out(F.relu(self.norm_of_rows(self.hidden(x))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Pairs(nn.Module):
    """Embeds two sets of vectors; every row is to be closest to the row with its number."""

    def __init__(self, over="both"):
        super().__init__()
        self.encode = nn.Linear(4, 6)
        self.over = over
        rng = np.random.default_rng(2)
        for parameter in self.parameters():
            parameter.assign_value(mindspore.Tensor(rng.normal(0, 0.5, parameter.shape).astype(np.float32)))

    def forward(self, a, b, first):
        a, b = F.normalize(self.encode(a)), F.normalize(self.encode(b))
        candidates = dp.all_gather_with_grad(b)
        queries, place = (dp.all_gather_with_grad(a), 0) if self.over == "both" else (a, int(first.asnumpy()[0]))
        labels = mindspore.Tensor(np.arange(place, place + len(queries)), mindspore.int64)
        return {"loss": F.cross_entropy(queries @ candidates.T * 5.0, labels)}


def pairs(num_samples):
    """Return samples of two vectors that are near to each other."""
    rng = np.random.default_rng(1)
    a = rng.normal(0, 1, (num_samples, 4)).astype(np.float32)
    b = (a + rng.normal(0, 0.5, a.shape)).astype(np.float32)
    return [{"a": x, "b": y, "first": np.int64(0)} for x, y in zip(a, b)]
