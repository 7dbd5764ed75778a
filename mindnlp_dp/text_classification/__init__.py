"""A complete text classification job (data, tokenizer, model, report), which the quickstart and the homework use.

Read finetune_classifier.py first, the steps in order; then classification_task.py.
"""
