"""Train a baseline on the same data in seconds: a bag of words and logistic regression.

    python homework/baseline.py --train-file train.csv --test-file test.csv        (pip install "mindnlp-dp[homework]")

It uses word counts and scikit-learn's defaults; nothing is tuned. A model should be compared with its accuracy.
"""

from __future__ import annotations

import argparse
import sys
import time

from mindnlp_dp.finetuning.settings import InputError
from mindnlp_dp.text_classification.examples import label_ids, read_examples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-file", required=True, help="CSV, TSV or JSON lines with texts and labels")
    parser.add_argument("--test-file", required=True, help="the held-out split")
    args = parser.parse_args()
    try:
        from sklearn.feature_extraction.text import CountVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        sys.exit('error: the baseline needs scikit-learn; pip install "mindnlp-dp[homework]"')
    try:
        train, test = read_examples(args.train_file), read_examples(args.test_file)
        names = sorted(set(train.labels))
        train_labels, test_labels = (
            label_ids(split.labels, names, file) for split, file in ((train, args.train_file), (test, args.test_file))
        )
    except InputError as error:
        sys.exit(f"error: {error}")
    began = time.perf_counter()
    words = CountVectorizer()
    classifier = LogisticRegression(max_iter=1000)
    classifier.fit(words.fit_transform(train.texts), train_labels)
    accuracy = classifier.score(words.transform(test.texts), test_labels)
    print(
        f"bag of words: accuracy {accuracy:.4f} on {len(test)} held-out samples, {len(names)} labels; "
        f"{len(words.vocabulary_)} words, {time.perf_counter() - began:.1f} s"
    )


if __name__ == "__main__":
    main()
