"""A whole text classification job: data, tokenizer, model, report. What the quickstart and the homework are made of."""
