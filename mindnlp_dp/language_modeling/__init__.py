"""A whole job that fine-tunes a language model: conversations, tokenizer, model, LoRA, report.

Read finetune_language_model.py first, the steps in order; then forms.py and conversations.py for the data, templates.py
for the text of a conversation.
"""
