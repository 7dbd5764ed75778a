#!/usr/bin/env python3
"""Train a RoBERTa or BERT text classifier on any number of processes.

The code is in mindnlp_dp/text_classification/finetune_classifier.py.

Examples:
    mindnlp-dp run --nproc 2 scripts/finetune.py --config configs/quickstart_cpu.yaml
    msrun --worker_num=2 --local_worker_num=2 scripts/finetune.py --train-file train.csv --test-file test.csv
"""

from mindnlp_dp.text_classification.finetune_classifier import main

if __name__ == "__main__":
    main()
