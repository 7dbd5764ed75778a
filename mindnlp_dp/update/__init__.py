"""From averaged gradients to new weights, by every rank as a whole or by each its share.

Goes in: what the exchange leaves in the buckets. Comes out: the same new weights on every rank, to the bit, whatever
the number of ranks and however the work is divided::

    buckets ── squares of own blocks ── norm ── own slices scaled ── rule ── weights ── barrier, or gather
               (block_sums.py)   one small     (flat.py)       (rules.py)  (flat_weights.py)
                                 all-reduce                     its state: state_shards.py

Who updates what, by ``zero_stage`` (choose.py), after Rajbhandari, Rasley, Ruwase and He, "ZeRO: memory optimizations
toward training trillion parameter models", 2020: 0 all of it, 1 and 2 each rank a slice, whose optimizer state nobody
else has; with 2 it gets no more of the gradients, either. On one host of a CPU, ranks that divide the update share one
set of weights, and nothing is sent. Optimizers that have no rule here get whole parameters (dealt.py).
"""
