"""Prefill over a ring: K/V blocks travel, queries stay (Ring Attention, arXiv:2310.01889; arXiv:2411.01783).

Each rank computes cp partial attentions in program order while the next block is on its way. A send waits for the
block it forwards and for nothing else, in particular for no compute op of the ring: that is what lets
communication and computation overlap.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Ids


def pass_kv(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add cp ring steps and cp - 1 sends per rank; see the package docstring for the arguments."""
    cp = ranks.shape[1]
    duration = keys.duration(("ring_step", kind))
    message = keys.message(("cp_pass_kv", kind))
    following = np.roll(ranks, -1, axis=1)
    attended = b.compute(ranks, duration, "attention", 0)
    b.edge(ready, attended)
    held = ready
    for step in range(1, cp):
        sent = b.flow(ranks, following, message, "cp_pass_kv", step - 1)
        b.edge(held, sent)
        held = np.roll(sent, 1, axis=1)
        before, attended = attended, b.compute(ranks, duration, "attention", step)
        b.edge(before, attended)
        b.edge(held, attended)
    return attended
