"""This package writes and reads checkpoints, from which a run resumes as if it had never stopped.

A checkpoint is complete or does not exist, it is verified when it is read, and nothing in it can run code. It is a
folder with the model and the rest of the run's state, which is packed as a tree (state_tree.py)::

    checkpoint-200/
        checkpoint.json      the tree's outline; size and hash of every other file; written last
        state.safetensors    the tree's arrays: optimizer moments
        state-R-of-N.safetensors    those that ranks shard, with sharded_checkpoints (shard_files.py)
        model.safetensors    the weights (large models: several such files), beside MindNLP's config.json
        ...                  what else the writer of the model puts there

One process writes a folder under a temporary name and renames it, so that a killed writer leaves nothing that looks
like a checkpoint. The hashes reveal a disk that loses or changes data.

The format is defined in manifest.py (checkpoint.json), state_tree.py (the outline and the arrays) and run_state.py
(the state of a run, to which the loops in training/trainer/training_loop.py and training/resumable_run.py add theirs).
directory.py lists the checkpoints of each run; folder_lock.py keeps a second writer out.
"""
