"""A whole job that fine-tunes a language model: conversations, tokenizer, model, LoRA, report."""
