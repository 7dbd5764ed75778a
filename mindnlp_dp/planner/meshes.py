"""Enumerates the meshes that are possible for a model apart from memory, and says why the others are not.

The search for candidates and :func:`~mindnlp_dp.planner.predict` call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mindnlp_dp.planner.stage_costs import Sharing
from mindnlp_dp.schedules.mesh_spec import mesh_name

from .operators import Model


def meshes(
    model: Model, num_devices: int, batch: int, num_layers: int, reject: Callable[[str, str], None]
) -> Iterator[tuple[int, Sharing]]:
    """Yield the number of stages and the sharing of each possible mesh; call ``reject`` with each impossible one."""
    for tp in divisors(num_devices):
        problem = tensor_problem(model, tp)
        if problem:
            reject(f"tp={tp}", problem)
            continue
        for pp in divisors(num_devices // tp):
            problem = _stage_problem(model, pp, num_layers)
            if problem:
                if tp == 1:
                    reject(f"pp={pp}", problem)
                continue
            for ep in divisors(num_devices // tp // pp):
                sharing = Sharing(num_devices // tp // pp // ep, tp, ep)
                problem = _expert_problem(model, sharing, pp) or _batch_problem(batch, sharing)
                if not problem:
                    yield pp, sharing
                elif ep == 1 or (tp == pp == 1 and model.experts):
                    reject(mesh_name(sharing.mesh(pp)), problem)


def mesh_problem(model: Model, pp: int, sharing: Sharing, batch: int, num_layers: int) -> str:
    """Return why a mesh is impossible, apart from memory; "" if it is possible."""
    return (
        tensor_problem(model, sharing.tp)
        or _stage_problem(model, pp, num_layers)
        or _expert_problem(model, sharing, pp)
        or _batch_problem(batch, sharing)
    )


def tensor_problem(model: Model, tp: int) -> str:
    """Return why tensors cannot be sharded over ``tp`` devices; "" if they can."""
    for name, number in model.divides.items():
        if number % tp:
            return f"{tp} does not divide {name}, {number}"
    if model.kind == "operators":
        for o in model.graph.operators:
            if o.kind == "matmul" and (o.width_in % tp or o.width_out % tp):
                return f"{tp} does not divide a width of {o.name}"
    return ""


def _stage_problem(model: Model, pp: int, num_layers: int) -> str:
    most = min(model.most_stages or num_layers, num_layers)
    return f"{model.name} has {most} layers that may be stages" if pp > most else ""


def _expert_problem(model: Model, sharing: Sharing, pp: int) -> str:
    if sharing.ep == 1:
        return ""
    if not model.experts or model.experts % sharing.ep:
        return f"{sharing.ep} does not divide {model.experts} experts"
    if sharing.tp > 1 or pp > 1:
        return "experts are spread with data parallelism alone"
    return ""


def _batch_problem(batch: int, sharing: Sharing) -> str:
    return f"{sharing.num_data} does not divide the batch of {batch}" if batch % sharing.num_data else ""


def divisors(n: int, most: int = 1 << 16) -> list[int]:
    """Return the divisors of ``n`` up to ``most``.

    >>> divisors(12), divisors(12, 3)
    ([1, 2, 3, 4, 6, 12], [1, 2, 3])
    """
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]
