"""This package runs training: the Trainer, custom training loops, evaluation, and resuming.

Read train_step.py first: one update, from micro-batches to equal weights on every rank. forward_backward.py runs its
passes; make_train_step.py wraps it for custom loops, and trainer/ for MindNLP's Trainers, with a folder for each of
MindNLP's release series.
"""
