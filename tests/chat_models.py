"""Small untrained chat models with the special tokens, end tokens and chat templates of well-known ones, and chats."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import processors
from tokenizers.implementations import ByteLevelBPETokenizer

from mindnlp_dp.runtime.mindnlp_api import transformers_api

# Templates that behave as the published ones: Qwen2 has a default system prompt; Llama 3 trims, and has a token that
# begins a text; Gemma refuses system prompts and roles that do not alternate, and calls the assistant "model"; Mistral
# ends what the assistant says with the tokenizer's own end; Qwen2.5 writes tools and their calls; Qwen3 drops the
# reasoning of earlier turns.
TEMPLATES = {
    "qwen2": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n\nBe kind.<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ '<start_of_turn>' }}"
        "{{ ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "qwen2.5": (
        "{% if tools %}{{ '<|im_start|>system\nTools:\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
        "{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
        "{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"
        "{{ '<tool_call>' + f.name + f.arguments | tojson + '</tool_call>' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "qwen3": (
        "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content and loop.index0 > last.user %}"
        "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
LLAMA3 = (
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)
# Special tokens; the tokenizer's end; end tokens of generation_config.json; the chat template.
KINDS = {
    "qwen base": (CHATML, "<|endoftext|>", (), "qwen2"),
    "qwen instruct": (CHATML, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"), "qwen2"),
    "gpt2": (("<|endoftext|>",), "<|endoftext|>", (), None),
    "gemma": (GEMMA, "<eos>", ("<eos>", "<end_of_turn>"), "gemma"),
    "gemma base": (GEMMA, "<eos>", (), "gemma"),
    "llama3": (LLAMA3, "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "llama3"),
    "mistral": (("<unk>", "<s>", "</s>"), "</s>", (), "mistral"),
    "mistral base": (("<unk>", "<s>", "</s>"), "</s>", (), None),
}
WORDS = ("red", "blue", "pink", "green", "black", "white")


def save_untrained(kind, folder, template=None):
    """Save a model of a kind, with its tokenizer, into a folder."""
    from library import set_seed

    special, eos, ends, own = KINDS[kind]
    bpe = ByteLevelBPETokenizer()
    said = [f"say {word} it is user assistant system model Be kind." for word in WORDS]
    bpe.train_from_iterator(said * 3, vocab_size=400, min_frequency=2, special_tokens=[*special], show_progress=False)
    first = next((token for token in special if token in ("<bos>", "<s>", "<|begin_of_text|>")), None)
    if first:
        bpe._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, bpe.token_to_id(first))]
        )
    tokenizer = transformers_api().PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=eos, bos_token=first, clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATES.get(template or own)
    set_seed(1)
    if kind == "gpt2":
        sizes = {"n_positions": 96, "n_embd": 64, "n_layer": 2, "n_head": 2}
        config, name = transformers_api().GPT2Config(vocab_size=len(tokenizer), **sizes), "GPT2LMHeadModel"
    else:
        config, name = transformers_api().LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=128, max_position_embeddings=128,
        ), "LlamaForCausalLM"  # fmt: skip
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    model = getattr(transformers_api(), name)(config)
    if ends:
        model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(token) for token in ends]
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def write_chats(folder):
    """Write chats of one turn and of two, and return the flags that train on them."""
    rows = [{"messages": chat(word)} for word in WORDS]
    rows += [{"messages": [*chat(word), *chat(other)]} for word, other in zip(WORDS, WORDS[1:])]
    Path(folder, "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 4))
    return ["--train-file", f"{folder}/chats.jsonl", "--test-file", f"{folder}/chats.jsonl"]


def chat(word):
    return [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": f"{word} it is"}]


def run(monkeypatch, folder, *flags):
    """Run the recipe on the chats, and return its report."""
    from mindnlp_dp.language_modeling.finetune_language_model import main

    sizes = "--hidden-size 64 --num-layers 2 --num-heads 2 --intermediate-size 128 --max-length 64 --vocab-size 300"
    steps = "--max-steps 100 --global-batch-size 8 --learning-rate 5e-3 --max-new-tokens 16 --num-samples 2"
    folders = ["--output-dir", str(folder / "out"), "--cache-dir", str(folder / "cache")]
    words = ["finetune_llm.py", *sizes.split(), *steps.split(), *folders, *map(str, flags)]
    monkeypatch.setattr(sys, "argv", [*words, *write_chats(folder)])
    main()
    return json.loads((folder / "out/report.json").read_text())


# The template to train with, and the token that ends a turn.
CASES = {
    "tiny": ("chatml", "<|im_end|>"),
    "qwen base": ("chatml", "<|im_end|>"),
    "qwen instruct": ("tokenizer", "<|im_end|>"),
    "gpt2": ("chatml", "<|im_end|>"),
    "gemma": ("tokenizer", "<end_of_turn>"),
    "gemma base": ("tokenizer", "<end_of_turn>"),
    "llama3": ("tokenizer", "<|eot_id|>"),
    "mistral": ("tokenizer", "</s>"),
    "mistral base": ("chatml", "<|im_end|>"),
}


def train(monkeypatch, tmp_path, kind):
    """Train a model of a kind on chats, with its template; return the report, and the end of a turn."""
    template, end = CASES[kind]
    flags = ["--template", template]
    if kind != "tiny":
        save_untrained(kind, tmp_path / "base")
        flags += ["--model", tmp_path / "base"]
    return run(monkeypatch, tmp_path, *flags), end


def train_adapters(monkeypatch, folder, kind, *flags):
    """Train adapters for an untrained model of a kind; return their folder."""
    save_untrained(kind, folder / "base")
    template = "plain" if kind == "gpt2" else "chatml"
    words = ["--model", folder / "base", "--lora-rank", 4, "--template", template, "--lora-alpha", 32, *flags]
    run(monkeypatch, folder, *words)
    return folder / "out/model"
