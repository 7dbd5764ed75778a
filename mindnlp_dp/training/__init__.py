"""This package runs training: the Trainer, custom training loops, evaluation, and resuming.

The train step (train_step.py) makes one update, from the micro-steps of a gradient accumulation update to equal weights
on every rank. :func:`~mindnlp_dp.make_train_step` wraps it for custom loops; trainer/ for MindNLP's Trainers, with a
folder for each of MindNLP's release series.
"""
