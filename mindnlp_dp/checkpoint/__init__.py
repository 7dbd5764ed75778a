"""Checkpoints: complete or not there, checked when read, and nothing in them can run code.

Goes in: a model, and everything else that a run consists of, as a tree
(state_tree.py). Comes out: a folder, from which a run is taken up as
if it had never stopped::

    checkpoint-200/
        checkpoint.json      the tree's outline; size and hash of every other file; written last
        state.safetensors    the tree's arrays: optimizer moments, random states
        model.safetensors    the weights (large models: several such files), beside MindNLP's config.json
        ...                  what else the writer of the model puts there

One process writes a folder. It is written under another name and renamed, so that a
killed writer leaves nothing that looks like a checkpoint; a disk that loses or changes
a part of it is found out by the hashes.

The format is manifest.py's (checkpoint.json), state_tree.py's (the outline and the arrays) and run_state.py's (what a
run consists of; the loops add their own, trainers/resuming.py and functional/resumable_run.py); folders.py
knows which checkpoints there are, of which run; folder_lock.py keeps a second writer out.
"""
