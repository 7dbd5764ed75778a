r"""Adapt a language model with LoRA on any number of processes: the second exercise.

    mindnlp-dp run --nproc 2 scripts/finetune_llm.py --output-dir outputs/manual
    mindnlp-dp run --nproc 2 homework/lora_docstrings.py outputs/manual/model

The first command trains a small Llama on Python's manual. The second one freezes it, and trains adapters that make it
complete a function's name by the first line of its docstring. The data is that of the running Python.
"""

import importlib
import inspect
import math
import sys
import zlib

import numpy as np

# Import it before mindnlp: it makes MindNLP run on this MindSpore.
import mindnlp_dp as dp
from mindnlp_dp.finetuning.tokenizers import pretrained_tokenizer
from mindnlp_dp.language_modeling.conversations import Conversation, Message
from mindnlp_dp.language_modeling.rows import Collator, TokenRows
from mindnlp_dp.language_modeling.templates import plain
from mindnlp_dp.language_modeling.tokenize_conversations import encode

import mindspore  # isort: skip
from mindnlp.engine import set_seed  # isort: skip
from mindnlp.peft import LoraConfig, get_peft_model  # isort: skip
from mindnlp.transformers import AutoModelForCausalLM  # isort: skip

MODULES = "builtins collections datetime itertools json math os pathlib random re shutil statistics string".split()
MAX_LENGTH, RANK, EPOCHS, BATCH_SIZE, LEARNING_RATE = 64, 8, 3, 32, 5e-3


def docstrings():
    """Return a training and a held-out split of (name, first line of its docstring)."""
    pairs = {}
    for module in map(importlib.import_module, MODULES):
        for name, value in inspect.getmembers(module):
            members = inspect.getmembers(value) if inspect.isclass(value) else []
            for inner, each in [("", value), *((f".{inner}", each) for inner, each in members)]:
                line = (inspect.getdoc(each) or "").partition("\n")[0] if callable(each) else ""
                if line.endswith(".") and not (name + inner).startswith("_") and "._" not in inner:
                    # The first name of a text that several functions share.
                    pairs.setdefault(f" {line}", f"{module.__name__}.{name}{inner}:")
    held_out = {line: zlib.crc32(line.encode()) % 10 == 0 for line in pairs}
    said = {line: Conversation([Message("user", name), Message("assistant", line)]) for line, name in pairs.items()}
    return tuple([said[line] for line in pairs if held_out[line] == is_test] for is_test in (False, True))


def rows_of(conversations, tokenizer, eos):
    encoded = [encode(each, plain, tokenizer, eos, MAX_LENGTH)[:2] for each in conversations]
    return TokenRows.of([[(ids, labels)] for ids, labels in encoded if (labels >= 0).any()])


def logits_of(model, rows):
    model.set_train(False)
    ids = mindspore.Tensor(rows[0]["input_ids"][None])
    return model(input_ids=ids).logits.asnumpy()


def main(folder, output_dir="outputs/lora_docstrings", epochs=EPOCHS):
    group = dp.init_process_group()
    tokenizer, fast = pretrained_tokenizer(folder)
    train, test = (rows_of(split, fast, tokenizer.eos_token_id) for split in docstrings())

    # Adapters start with random numbers: the same in every run, and on all ranks, which get those of rank 0.
    set_seed(1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True),
        LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj", "o_proj"]),
    )
    args = dp.DataParallelArguments(
        output_dir,
        per_device_train_batch_size=BATCH_SIZE // group.world_size,
        per_device_eval_batch_size=BATCH_SIZE,
        num_train_epochs=epochs,
        learning_rate=LEARNING_RATE,
        logging_steps=10,
        save_strategy="no",
        prediction_loss_only=True,
        remove_unused_columns=False,
    )
    collator = Collator(tokenizer.pad_token_id, is_packed=False)
    trainer = dp.DataParallelTrainer(model, args, train_dataset=train, eval_dataset=test, data_collator=collator)

    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    digest = dp.assert_replicas_in_sync(model)

    sizes = [(p.requires_grad, math.prod(p.shape)) for p in model.parameters()]
    trained, all_of_them = sum(size for trains, size in sizes if trains), sum(size for _, size in sizes)
    # Merged into the weights that they adapt, the adapters compute the same.
    apart = logits_of(model, test)
    model.merge_adapter()
    difference = np.abs(logits_of(model, test) - apart).max() / np.abs(apart).max()
    model.unmerge_adapter()
    if group.is_main:
        model.save_pretrained(f"{output_dir}/adapter")
        print(f"held-out perplexity: {math.exp(before):.1f} before, {math.exp(after):.1f} after {epochs} epochs")
        print(f"trained: {trained:,} of {all_of_them:,} parameters ({100 * trained / all_of_them:.1f} %)")
        print(f"each update exchanges {4 * trained / 1e6:.2f} MB, and {4 * all_of_them / 1e6:.2f} MB without LoRA")
        print(f"merged and separate weights differ by {difference:.1e} of the largest logit; digest {digest}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} MODEL_FOLDER [OUTPUT_DIR [EPOCHS]]; see the top of this file")
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]))
