"""A complete text classification job (data, tokenizer, model, report), which the quickstart and the homework use."""
