"""This module is the Trainer's evaluation loop, which ``evaluate`` and ``predict`` run over a loader."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any, Optional

import mindspore
import numpy as np

from mindnlp_dp.runtime.arrays import number_of
from mindnlp_dp.training.evaluate import EvaluationRun, with_prefix
from mindnlp_dp.training.evaluation_gather import to_numpy
from mindnlp_dp.training.trainer.mindnlp_trainer import EvalLoopOutput, EvalPrediction, denumpify_detensorize
from mindnlp_dp.training.trainer.trainer_interface import TrainerInterface


def run_evaluation(
    trainer: TrainerInterface,
    dataset: Any,
    prediction_loss_only: Optional[bool],
    ignore_keys: Optional[list[str]],
    metric_key_prefix: str,
) -> EvalLoopOutput:
    """Run the loop for :meth:`.DataParallelTrainerBase.evaluation_loop` and return its result; every rank calls it."""
    args, model = trainer.args, trainer.model
    if prediction_loss_only is None:
        prediction_loss_only = args.prediction_loss_only
    if not trainer.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
        trainer.model = model = model.to(dtype=mindspore.float16 if args.fp16_full_eval else mindspore.bfloat16)
    model.eval()
    trainer.distributed_model.broadcast_buffers()
    if args.past_index >= 0:
        trainer._past = None
    handler = trainer.callback_handler
    # MindNLP 0.4 uses one of these names, Transformers the other.
    handler.eval_dataset = handler.eval_dataloader = dataset
    sees_inputs = args.include_inputs_for_metrics or "inputs" in getattr(args, "include_for_metrics", ())
    main_input = trainer.main_input
    span_loss = trainer.trainer_loss.span_loss(evaluates=True)
    check_columns = trainer.trainer_loss.column_checks()
    evaluation = EvaluationRun(trainer.group, args.eval_accumulation_steps)
    # A user's own loader may have several micro-batches in an update.
    for mine in itertools.chain.from_iterable(dataset.updates()):
        batch, is_lent = trainer.distributed_model.dummy_batch_for(mine), mine is None
        if batch is None:
            evaluation.add(None)
        else:
            check_columns(batch)
            inputs = trainer.tensors(batch)
            with span_loss.terms() as terms:
                loss, logits, labels = trainer.prediction_step(
                    model, dict(inputs), prediction_loss_only, ignore_keys=ignore_keys
                )
            if logits is not None and trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
            seen = batch[main_input] if sees_inputs else None
            outputs = {"logits": to_numpy(logits), "labels": to_numpy(labels), "inputs": seen}
            outputs = {key: value for key, value in outputs.items() if value is not None}
            mean_loss = None if loss is None else number_of(loss)
            if is_lent:
                # A dummy batch: other ranks needed this rank's experts for theirs.
                evaluation.add(None)
            elif mean_loss is not None and terms:
                evaluation.add(outputs or None, len(batch.indices), *terms[-1])
            else:
                weight = 0.0 if mean_loss is None else trainer.evaluation_weight(inputs)
                evaluation.add(outputs or None, len(batch.indices), mean_loss, weight)
        trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
    gathered, mean_loss, num_samples = evaluation.finish()
    gathered = gathered or {}

    metrics: dict[str, Any] = {}
    predictions, label_ids = gathered.get("logits"), gathered.get("labels")
    if trainer.compute_metrics is not None and predictions is not None and label_ids is not None:
        inputs_seen = {"inputs": gathered["inputs"]} if "inputs" in gathered else {}
        prediction = EvalPrediction(predictions=predictions, label_ids=label_ids, **inputs_seen)
        metrics = trainer.world.run_on_rank0(
            lambda: plain_metrics(trainer.compute_metrics(prediction)), "compute_metrics"
        )
    if mean_loss is not None:
        metrics["loss"] = mean_loss
    return EvalLoopOutput(predictions, label_ids, with_prefix(metrics, metric_key_prefix), num_samples)


def plain_metrics(returned: Any) -> dict[str, Any]:
    """Return what ``compute_metrics`` has returned as numbers, texts, and lists and dicts of them; arrays become lists.

    Raises:
        TypeError: it is not a dict of metrics by name, or JSON, in which a run's log is saved, cannot hold a metric.
    """
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"compute_metrics returned {_described(returned)}, expected a dict of names and numbers, such as "
            '{"accuracy": 0.9}'
        )
    metrics = denumpify_detensorize(_without_arrays(returned))
    for name, value in metrics.items():
        try:
            if not isinstance(name, str):
                raise TypeError("names are texts")
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"compute_metrics returned {name!r} with {_described(value)}, which the log of a run cannot hold "
                f"({error}): expected a text as the name, and a number, a text, an array, or lists and dicts of them"
            ) from error
    return metrics


def _described(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _without_arrays(value: Any) -> Any:
    """Return a nested structure with arrays and tensors of several elements as lists."""
    if isinstance(value, Mapping):
        return {name: _without_arrays(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(item) for item in value]
    if hasattr(value, "asnumpy"):
        array = to_numpy(value)
        return array.item() if array.size == 1 else array.tolist()
    return value.tolist() if isinstance(value, np.ndarray) else value
