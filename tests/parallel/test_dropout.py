"""Test that dropout draws each sample's mask from its position in the global batch.

Any number of ranks and micro-steps, and any mesh, then trains what one process with the full batch trains.
"""

from __future__ import annotations

import numpy as np
import pytest
from library import is_0_5, optim
from small_models import FIRST_WORD, IGNORED, NUM_LABELS, VOCAB_SIZE, batch, build, find, samples
from token_losses import distance, settings, together_and_alone, whole_batch

import mindnlp_dp as dp
from mindnlp_dp.data.batches import Batch
from mindnlp_dp.kernels import dispatch
from mindnlp_dp.parallel.device_mesh import get_device_mesh
from mindnlp_dp.runtime.mesh_spec import parse_mesh
from models import alone, train, weights

if not is_0_5:
    # The first name is an autouse fixture for every test here.
    from sharded_models import one_mesh_at_a_time, whole_weights  # noqa: F401

MOST = 1e-5
RATE = 0.1


@pytest.mark.parametrize("name", ["RobertaForMultipleChoice", "BartForConditionalGeneration"])
def test_dropout_of_models_with_several_rows_per_sample_equals_one_process(group, tmp_path, name):
    far, *_ = together_and_alone(group, tmp_path, name, 2, p=RATE)
    assert far < MOST


@pytest.mark.skipif(is_0_5, reason="the small models of MindNLP 0.4")
@pytest.mark.parametrize("name", ["FSMTForConditionalGeneration", "XLNetLMHeadModel"])
def test_dropout_of_sequence_first_models_equals_one_process(group, tmp_path, name):
    far, *_ = together_and_alone(group, tmp_path, name, 2, p=RATE)
    assert far < MOST


def ragged_samples(model_class, num_rows):
    """Return samples of 5 to 50 tokens; those of encoder-decoder models have targets of other lengths."""
    random, rows = np.random.RandomState(5), []
    max_label = NUM_LABELS if "TokenClassification" in model_class.name else VOCAB_SIZE
    for size, target_size in random.randint(5, 51, (num_rows, 2)):
        row = {"input_ids": random.randint(FIRST_WORD, VOCAB_SIZE, size), "attention_mask": np.ones(size, np.int64)}
        if "SequenceClassification" in model_class.name:
            row["labels"] = random.randint(0, 2)
        else:
            is_seq2seq = "ConditionalGeneration" in model_class.name
            row["labels"] = random.randint(0, max_label, target_size if is_seq2seq else size)
            # Padding on the left would make it the label of a padding token.
            row["labels"][0] = IGNORED
        rows.append(row)
    return rows


def pad_to_longest(rows, *, left=False):
    """Collate a micro-batch: rows are padded to the longest of them."""
    columns = {"labels": np.stack([row["labels"] for row in rows])} if np.ndim(rows[0]["labels"]) == 0 else {}
    for name, value in {"input_ids": 1, "attention_mask": 0, "labels": IGNORED}.items():
        if name not in columns:
            longest = max(len(row[name]) for row in rows)
            missing = [longest - len(row[name]) for row in rows]
            pads = [(number, 0) if left else (0, number) for number in missing]
            columns[name] = np.stack([np.pad(row[name], pad, constant_values=value) for row, pad in zip(rows, pads)])
    return columns


RAGGED = [
    "BertForSequenceClassification", "RobertaForSequenceClassification", "GPT2LMHeadModel", "LlamaForCausalLM",
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "DebertaV2ForSequenceClassification",
]  # fmt: skip


# DeBERTa's table of relative positions has 64 rows, which every batch divides.
DEBERTA = {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 32, "max_relative_positions": 32,
    "initializer_range": 0.3,
}  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize("name", [name for name in RAGGED if not (is_0_5 and name.startswith("Deberta"))])
def test_dropout_with_per_micro_batch_padding_equals_one_process(group, tmp_path, name, accumulation_steps, recwarn):
    check_ragged(group, tmp_path, name, accumulation_steps, pad_to_longest)
    assert not warnings_of_dropout(recwarn)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForTokenClassification"])
def test_dropout_with_left_padding_equals_one_process(group, tmp_path, name):
    def collate(rows):
        columns = pad_to_longest(rows, left=True)
        # Position embeddings are not to depend on the padding, either.
        return {**columns, "position_ids": np.maximum(columns["attention_mask"].cumsum(1) - 1, 0)}

    check_ragged(group, tmp_path, name, 1, collate)


def check_ragged(group, tmp_path, name, accumulation_steps, collate):
    """Train on ragged rows with all ranks, and with the full batch in one process; compare the weights."""
    model_class = find(name)
    more = DEBERTA if name.startswith("Deberta") else {}
    before = weights(build(model_class, **more))
    rows = ragged_samples(model_class, 4 * group.world_size * accumulation_steps + 3)
    mine = train(
        build(model_class, dropout=RATE, **more), rows, tmp_path, data_collator=collate,
        **settings(group, accumulation_steps),
    )  # fmt: skip
    with alone():
        one = train(
            build(model_class, dropout=RATE, **more), rows, tmp_path / "1", data_collator=collate,
            **whole_batch(group, accumulation_steps),
        )  # fmt: skip
    assert distance(weights(mine.model), weights(one.model), before) < MOST


@pytest.mark.core
def test_per_rank_dropout_trains_another_model(group, tmp_path):
    far, *_ = together_and_alone(group, tmp_path, "RobertaForSequenceClassification", 2, p=RATE, dropout="per-rank")
    assert far > 100 * MOST


@pytest.mark.core
def test_dropout_run_resumes_with_another_number_of_ranks(group, shared_tmp_path):
    """Four updates with all ranks, the rest in one process, and the other way round."""
    model_class = find("GPT2LMHeadModel")
    before = weights(build(model_class))
    rows = samples(model_class, build(model_class), 10 * group.world_size * 2)
    saving = {
        "save_steps": 4, "save_strategy": "steps", "num_train_epochs": 1, "lr_scheduler_type": "constant",
    }  # fmt: skip
    together, one = settings(group, 2, **saving), whole_batch(group, 2, **saving)
    folder = shared_tmp_path / f"alone-{group.rank}"
    with alone():
        expected = train(build(model_class, dropout=RATE), rows, folder, **one)
    train(build(model_class, dropout=RATE), rows, shared_tmp_path, **together, max_steps=4)
    with alone():
        checkpoint = str(shared_tmp_path / "checkpoint-4")
        resumed = train(build(model_class, dropout=RATE), rows, folder / "2", **one, resume=checkpoint)
    others = train(
        build(model_class, dropout=RATE), rows, shared_tmp_path / "3", **together, resume=str(folder / "checkpoint-4")
    )
    assert resumed.state.global_step == others.state.global_step == expected.state.global_step > 4
    for model in (resumed.model, others.model):
        assert distance(weights(model), weights(expected.model), before) < MOST


MESHES = {
    2: [("tp=2", "BertForMaskedLM"), ("tp=2", "T5ForConditionalGeneration"), ("tp=2", "GPT2LMHeadModel"),
        ("tp=2", "RobertaForMultipleChoice"),
        ("pp=2", "GPT2LMHeadModel"), ("pp=2", "BertForSequenceClassification")],
    3: [("pp=3", "BertForSequenceClassification")],
    4: [("dp=2,pp=2", "GPT2LMHeadModel"), ("dp=2,tp=2", "T5ForConditionalGeneration"),
        ("pp=2,dp=2|1,tp=1|2", "BertForMaskedLM")],
}  # fmt: skip


@pytest.mark.core
@pytest.mark.skipif(is_0_5, reason="models are sharded with MindNLP 0.4 only")
@pytest.mark.skipif(dp.get_process_group().backend != "mpi", reason="MindSpore's CPU library has no messages")
@pytest.mark.parametrize(("mesh", "name"), MESHES.get(dp.get_process_group().world_size, []))
def test_dropout_of_sharded_models_equals_one_process(group, tmp_path, mesh, name):
    model_class = find(name)
    rows = samples(model_class, build(model_class), 48)
    dp.init_device_mesh(parse_mesh(mesh))
    model = dp.parallelize(build(model_class, dropout=RATE))
    more = settings(group, 4, num_train_epochs=1)
    more["per_device_train_batch_size"] = 4 // get_device_mesh().dp_group.world_size
    mine = train(model, rows, tmp_path, **more)
    with alone():
        dp.init_device_mesh({"dp": 1})
        more.update(per_device_train_batch_size=16, gradient_accumulation_steps=1)
        one = train(build(model_class, dropout=RATE), rows, tmp_path / "1", **more)
    assert mine.state.global_step == one.state.global_step == 3
    assert distance(whole_weights(mine.model), weights(one.model), weights(build(model_class))) < MOST


def custom_loop(columns, size, group, *, knows_positions, **options):
    model = build(find("GPT2LMHeadModel"), dropout=RATE)
    parameters = model.trainable_params() if hasattr(model, "trainable_params") else list(model.parameters())
    step = dp.make_train_step(
        lambda **inputs: model(**inputs).loss, optim.SGD(parameters, lr=0.1), parameters, model=model, group=group,
        zero_stage=0, **options,
    )  # fmt: skip
    model.train()
    for begin in range(0, 12, size):
        mine = np.arange(begin, begin + size)[group.rank :: group.world_size]
        rows = {name: column[mine] for name, column in columns.items()}
        step(Batch(rows, mine, mine - begin) if knows_positions else rows)
    return weights(model)


@pytest.mark.core
def test_dropout_in_a_custom_loop_needs_row_positions_or_warns(group, recwarn):
    """Rows in any order train the same model if they say where they belong; else one warning tells."""
    model_class = find("GPT2LMHeadModel")
    before = weights(build(model_class))
    columns = batch(model_class, build(model_class), 12)
    mine = custom_loop(columns, 6, group, knows_positions=True)
    assert not warnings_of_dropout(recwarn)
    unknown = custom_loop(columns, 6, group, knows_positions=False)
    (warning,) = warnings_of_dropout(recwarn)
    assert "because the batches do not say where in the global batch their rows are" in warning
    with alone() as one:
        expected = custom_loop(columns, 6, one, knows_positions=True)
    assert distance(mine, expected, before) < MOST
    assert distance(unknown, expected, before) > 100 * MOST


def warnings_of_dropout(recorded):
    return [str(each.message) for each in recorded if str(each.message).startswith("dropout: another number of ranks")]


def test_unknown_dropout_option_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dropout must be 'global' or 'per-rank', got 'local'"):
        dp.DataParallelArguments(str(tmp_path), dropout="local")


@pytest.mark.core
def test_dropout_with_the_kernels_of_mindspore_equals_one_process(group, tmp_path, recwarn):
    dispatch.choose("mindspore", 1)
    try:
        far, *_ = together_and_alone(group, tmp_path, "RobertaForSequenceClassification", 2, p=RATE)
    finally:
        dispatch.choose("auto", 1)
    assert far < MOST
    assert not warnings_of_dropout(recwarn)
