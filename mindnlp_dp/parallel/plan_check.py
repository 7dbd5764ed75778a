"""Compares a sharded model with the whole one on one batch; :func:`~mindnlp_dp.parallelize` calls it for ``check=``.

The whole model runs first, on every rank, then the sharded one; both without dropout. The loss, the gradients after
their exchange, and the outputs of all modules that every rank has in full must agree. So a plan that shards a layer in
a wrong way is an error that names the layer, before a training run that would silently learn something else.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np

from mindnlp_dp.communication.replicas import broadcast_parameters
from mindnlp_dp.data.batches import call_with
from mindnlp_dp.data.loss_weight import LossWeigher, loss_mean
from mindnlp_dp.parallel.device_mesh import DeviceMesh
from mindnlp_dp.parallel.pipeline_parallel.pipeline_micro_batch import PipelineMicroBatch
from mindnlp_dp.parallel.pipeline_parallel.stages import ReceivedActivations, StagePlaceholder
from mindnlp_dp.parallel.sharded_model import ShardedModel
from mindnlp_dp.runtime.arrays import to_host
from mindnlp_dp.runtime.mindnlp_api import mindnlp_api

# The largest relative differences that rounding explains: of losses, of outputs, and of a parameter's gradient.
LOSS_TOLERANCE, OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 1e-3, 1e-3
# A gradient that is smaller than this part of all gradients may be mostly rounding, such as that of keys.
_LEAST_GRADIENT = 1e-3


class PlanCheck:
    """Runs the whole model on a batch when it is made, and the sharded model in :meth:`compare`.

    Args:
        model: the whole model; it gets the weights of rank 0. A collective.
        mesh: the mesh that the model will be sharded over.
        batch: columns as arrays, with labels, the same on every rank.

    Raises:
        ValueError: the model returns no loss for the batch.
    """

    def __init__(self, model: Any, mesh: DeviceMesh, batch: Mapping[str, Any]) -> None:
        self._mesh, self._batch = mesh, _checked(batch, mesh)
        self._weight_of = LossWeigher(loss_mean(model), f"the loss of {type(model).__name__}")
        broadcast_parameters(model, mesh.world)
        with _evaluating(model):
            self._outputs = _Outputs(model)
            names, parameters = _trained(model)
            with self._outputs.recorded():
                loss, gradients = _loss_and_gradients(model, parameters, self._batch)
        if not np.isfinite(loss):
            raise ValueError(f"check= needs a batch with a finite loss, got {loss}: are there labels that count?")
        self.loss = loss
        self._gradients = {name: to_host(g).astype(np.float64) for name, g in zip(names, gradients) if g is not None}

    def compare(self, model: Any, parallel: ShardedModel) -> str:
        """Return a line that says how well the sharded model agrees. A collective.

        Raises:
            ValueError: on every rank, if it does not agree; the message names the first layer that differs.
        """
        with _evaluating(model):
            outputs = _Outputs(model)
            names, parameters = _trained(model)
            with outputs.recorded():
                loss, gradients = self._sharded_loss_and_gradients(model, parallel, names, parameters)
        worst, wrong = self._gradient_errors(parallel, dict(zip(names, gradients)))
        mine = (loss, outputs.differing(self._outputs), worst, wrong)
        everyone = self._mesh.world.all_gather_object(mine)
        losses = [each[0] for each in everyone]
        order = {name: number for number, name in enumerate(self._outputs.calls)}
        differing = sorted((found for each in everyone for found in each[1]), key=lambda found: order[found[0]])
        parts = list(parallel.placements)
        gradients_of = sorted(
            (found for each in everyone for found in each[3]), key=lambda found: parts.index(found[0])
        )
        problem = self._problem(max(losses, key=lambda value: abs(value - self.loss)), differing, gradients_of)
        if problem:
            raise ValueError(
                f"the plan is wrong for {type(model).__name__} under {self._mesh}: {problem}. The model is "
                "sharded now; build it again before another attempt"
            )
        return (
            f"checked: the loss of a batch, {self.loss:.6f}, and {len(self._gradients)} gradients equal those "
            f"of the full model (largest difference of a gradient: {max(each[2] for each in everyone):.1e} of its norm)"
        )

    def _sharded_loss_and_gradients(
        self, model: Any, parallel: ShardedModel, names: list[str], parameters: list[Any]
    ) -> tuple[float, list[Any]]:
        """Return the loss and the exchanged gradients when each data-parallel rank has the same batch. A collective."""
        synchronizer = parallel.make_synchronizer(list(zip(names, parameters)), overlap=False)
        if parallel.pipeline is None:
            with parallel.micro_step(1.0):
                loss, gradients = _loss_and_gradients(model, parameters, self._batch)
            synchronizer.accumulate(gradients, 1.0 / parallel.loss_replication)
        else:
            micro = PipelineMicroBatch(self._batch, lambda columns: _loss_of(model, columns), self._weight_of, seed=0)
            for step in parallel.pipeline.run([micro], parameters):
                loss = step.loss
                synchronizer.accumulate(step.gradients or [], step.loss_weight / step.loss_replication)
        return loss, synchronizer.reduce()

    def _problem(self, loss: float, outputs: list[tuple[str, str, float]], gradients: list[tuple[str, float]]) -> str:
        found = []
        if not abs(loss - self.loss) <= LOSS_TOLERANCE * max(abs(self.loss), 1.0):
            found.append(f"the loss of the batch is {loss:.6f}, and {self.loss:.6f} in the whole model")
        if outputs:
            name, kind, error = outputs[0]
            found.append(f"the first output that differs is that of {name or 'the model'!r} ({kind}), by {error:.1e}")
        elif found:
            found.append("the outputs of the layers agree: is the plan's head that of this model?")
        if gradients and not outputs:
            # The backward pass comes from the end.
            name, error = gradients[-1]
            found.append(f"the gradient of {name!r} differs by {error:.1e} of its norm, and those after it agree")
        return "; ".join(found)

    def _gradient_errors(
        self, parallel: ShardedModel, gradients: Mapping[str, Any]
    ) -> tuple[float, list[tuple[str, float]]]:
        """Return the largest relative difference of this rank's gradients, and those that are not rounding."""
        total = float(np.sqrt(sum(float(np.vdot(g, g)) for g in self._gradients.values())))
        worst, wrong = 0.0, []
        for name, gradient in gradients.items():
            placement = parallel.placements[name]
            full = self._gradients.get(placement.name)
            if full is None or gradient is None:
                continue
            error = float(np.linalg.norm(to_host(gradient) - parallel.placements.part(placement, full)))
            relative = error / max(float(np.linalg.norm(full)), _LEAST_GRADIENT * total, 1e-30)
            worst = max(worst, relative)
            if not relative <= GRADIENT_TOLERANCE:
                wrong.append((placement.name, relative))
        return worst, wrong


@dataclass
class _Outputs:
    """A few numbers about the outputs of a model's modules in one forward pass.

    Attributes:
        model: the model.
        calls: for each module's name, in the order in which the calls end, its class, the shape of its output, and
            three sums over the output; of modules that were called once.
    """

    model: Any
    calls: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = field(default_factory=dict)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the calls in this block; name the innermost module that is running in the message of an error."""
        running: list[str] = []
        numbers: dict[str, int] = {}
        handles = []
        for name, module in self.model.named_modules():
            handles += [
                module.register_forward_pre_hook(lambda module, args, name=name: running.append(name)),
                module.register_forward_hook(
                    lambda module, args, output, name=name: self._ended(name, module, output, running, numbers)
                ),
            ]
        try:
            yield
        except Exception as error:
            where = next((name for name in reversed(running) if name), "the model")
            raise ValueError(f"{where} failed in the check of the plan: {type(error).__name__}: {error}") from error
        finally:
            for handle in handles:
                handle.remove()
        # A stage may make only some of the calls of a module, and their numbers would be others.
        self.calls = {name: found for name, found in self.calls.items() if numbers[name] == 1}

    def _ended(self, name: str, module: Any, output: Any, running: list[str], numbers: dict[str, int]) -> None:
        while running and running.pop() != name:
            pass
        numbers[name] = numbers.get(name, 0) + 1
        if isinstance(module, ReceivedActivations):
            # Whatever came before has no effect.
            self.calls.clear()
        tensor = None if isinstance(module, StagePlaceholder) else _first_tensor(output)
        if tensor is not None:
            x = to_host(tensor).astype(np.float64).reshape(-1)
            sums = np.array([np.linalg.norm(x), x.sum(), x @ np.cos(np.arange(1, x.size + 1))])
            self.calls[name] = type(module).__name__, tuple(tensor.shape), sums

    def differing(self, full: _Outputs) -> list[tuple[str, str, float]]:
        """Return the modules whose output has the shape of the whole model's and other values."""
        found = []
        for name, (_, shape, sums) in self.calls.items():
            kind, expected_shape, expected = full.calls.get(name, ("", (), sums))
            if shape == expected_shape:
                error = float(np.abs(sums - expected).max() / max(expected[0], 1e-30))
                if not error <= OUTPUT_TOLERANCE:
                    found.append((name, kind, error))
        return found


def _first_tensor(output: Any) -> Optional[Any]:
    """Return the floating-point tensor that is the output, or the first that is in it."""
    if hasattr(output, "asnumpy"):
        return output if "loat" in str(output.dtype) and output.size else None
    items = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((tensor for tensor in map(_first_tensor, items) if tensor is not None), None)


def _checked(batch: Any, mesh: DeviceMesh) -> dict[str, np.ndarray]:
    """Return a batch's columns as arrays; raise ValueError on every rank if ranks have other ones. A collective."""

    def arrays() -> dict[str, np.ndarray]:
        if not isinstance(batch, Mapping) or not batch:
            raise ValueError(f"check= needs a batch, a mapping of columns, got a {type(batch).__name__}")
        columns = {name: to_host(x) if hasattr(x, "asnumpy") else np.asarray(x) for name, x in batch.items()}
        if any(column.ndim == 0 or len(column) == 0 for column in columns.values()):
            raise ValueError("check= needs a batch with rows")
        return columns

    columns = mesh.world.run_on(True, arrays, "looking at the batch to check")
    assert columns is not None, "every rank looks"
    digests = mesh.world.all_gather_object({name: _digest(column) for name, column in columns.items()})
    differing = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
    if differing is not None:
        raise ValueError(
            f"check= needs the same batch on every rank; rank {mesh.world.label(differing)} has another one"
        )
    return columns


def _digest(column: np.ndarray) -> str:
    described = f"{column.dtype}{column.shape}".encode()
    return hashlib.blake2b(described + np.ascontiguousarray(column).tobytes(), digest_size=8).hexdigest()


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Run the model without dropout in this block; afterwards each module has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.set_train(False)
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def _trained(model: Any) -> tuple[list[str], list[Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [name for name, _ in named], [parameter for _, parameter in named]


def _loss_of(model: Any, batch: Mapping[str, Any]) -> Any:
    outputs = call_with(model, batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if loss is None or loss.size != 1:
        raise ValueError("check= needs a batch for which the model returns a loss: add its labels")
    return loss.reshape(())


def _loss_and_gradients(model: Any, parameters: list[Any], batch: Mapping[str, Any]) -> tuple[float, Any]:
    gradient_fn = mindnlp_api().autograd.value_and_grad(
        lambda: _loss_of(model, batch), tuple(parameters), attach_grads=False
    )
    loss, gradients = gradient_fn()
    return float(loss.asnumpy()), gradients
