r"""Run the course's BERT example data parallel: three emotions in Chinese dialogue, or sentiment of films (IMDB).

    python homework/download_emotion.py                            # once: 2 MB into data/emotion
    bash scripts/homework_emotion.sh                               # two Ascend NPUs, with msrun
    mindnlp-dp run --nproc 2 homework/bert_emotion.py --model tiny # two CPU processes, from scratch
    bash scripts/homework_emotion.sh --dataset stanfordnlp/imdb --model bert-base-uncased --max-length 256

The script is train_data_parallel.py with another model and other data. The files are those of Baidu's archive: a header
line, then lines with a label (0 negative, 1 neutral, 2 positive), a tab and a text with spaces between the words.
"""

import sys
from pathlib import Path

FOLDER = Path("data/emotion")
DEFAULTS = {
    "train_file": str(FOLDER / "train.tsv"), "test_file": str(FOLDER / "test.tsv"), "model": "bert-base-chinese",
    "output_dir": "outputs/emotion", "max_length": 64, "num_epochs": 3, "global_batch_size": 64, "learning_rate": 3e-5,
}  # fmt: skip
FROM_SCRATCH = {"num_epochs": 5, "learning_rate": 1e-3}

if __name__ == "__main__":
    names_data = any(flag.partition("=")[0] in ("--train-file", "--dataset", "--config", "--help") for flag in sys.argv)
    if not names_data and not FOLDER.exists():
        sys.exit(f"error: there is no {FOLDER}; python homework/download_emotion.py fetches it, or pass --train-file")
    # Not above: it imports MindSpore, which takes seconds.
    from train_data_parallel import run

    run(description=__doc__, defaults=DEFAULTS, from_scratch=FROM_SCRATCH)
