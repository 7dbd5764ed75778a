"""This package runs the optimizer update after the exchange of gradients: replicated, or sharded as ZeRO 1 and 2.

It computes new weights from the sums in the buckets. The weights are bitwise identical on every rank, for any number of
ranks and any split of the work::

    buckets ── squares of own blocks ── norm ── own slices scaled ── rule ── weights ── barrier, or gather
               (block_sums.py)   one small     (flat.py)       (rules.py)  (flat_weights.py)
                                 all-reduce                     its state: state_shards.py

``zero_stage`` (choose.py) sets which rank updates what, after Rajbhandari, Rasley, Ruwase and He, "ZeRO: memory
optimizations toward training trillion parameter models", 2020. Stage 0: every rank updates everything. Stage 1: each
rank updates one slice, and only it has the optimizer state of this slice. Stage 2: it also gets only this slice of the
gradients. CPU ranks of one host that shard the update share one set of weights, and send nothing. Optimizers that have
no rule here run on full parameters (dealt.py).
"""
