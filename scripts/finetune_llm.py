#!/usr/bin/env python3
"""Fine-tune a language model on any number of processes: mindnlp_dp/language_modeling/finetune_language_model.py.

Examples:
    mindnlp-dp run --nproc 2 scripts/finetune_llm.py
    mindnlp-dp run --nproc 2 scripts/finetune_llm.py --model FOLDER --lora-rank 8 --train-file train.jsonl \
        --test-file test.jsonl --template chatml
"""

from mindnlp_dp.language_modeling.finetune_language_model import main

if __name__ == "__main__":
    main()
