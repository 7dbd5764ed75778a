"""A complete text classification job (data, tokenizer, model, report), which the quickstart and the homework use.

Read finetune.py first, the steps in order; then task.py.
"""
