"""Prefill over a ring: K/V blocks travel, queries stay (Ring Attention, arXiv:2310.01889; arXiv:2411.01783).

Each rank computes cp partial attentions in program order while the next block is on its way; what merges them is part
of the output projection's cost. A send waits for the block it forwards and for nothing else, in particular for no
compute op of the ring: that is what lets communication and computation overlap.

Under a runtime whose host blocks (``ring_step_sync_us``) every step begins with a host operation on the chip that waits
for the step before and for the block that arrived; the step's attention and the send of the block wait for it. They
still overlap each other, but a step takes as long as the slower of the two, and nothing runs ahead.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Ids


def pass_kv(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add cp ring steps, cp - 1 sends per rank; see the package docstring for the arguments."""
    return _ring(b, ranks, ready, keys, kind, "ring_step")


def pass_kv_blocking(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add the ring of a host that blocks before every step."""
    return _blocking_ring(b, ranks, ready, keys, kind, "ring_step")


def pass_kv_slowed(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add the ring of a chip whose attention a transfer slows down."""
    return _ring(b, ranks, ready, keys, kind, "slowed_ring_step")


def pass_kv_blocking_slowed(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add the ring of a host that blocks, on a chip whose attention a transfer slows down."""
    return _blocking_ring(b, ranks, ready, keys, kind, "slowed_ring_step")


def _ring(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int, accompanied: str) -> Ids:
    """Add a ring; ``accompanied`` names the cost of a step during which a block is on its way, all but the last."""
    cp, message = ranks.shape[1], keys.message(("cp_pass_kv", kind))
    place = np.arange(cp)
    # A block is forwarded as soon as it is there, whatever became of the one before.
    following = ranks.take((place + 1) % cp, axis=1)
    sent = b.relay(ranks, following, cp - 1, message, "cp_pass_kv", 0, "send_recv", in_order=False)
    arrived = sent.take(place - 1, axis=1)
    attended = b.compute(ranks, keys.duration((accompanied, kind)), "attention", n_steps=cp - 1)
    last = b.compute(ranks, keys.duration(("ring_step", kind)), "attention", cp - 1)
    b.edge(ready, sent)
    b.edge(ready, attended)
    b.edge(arrived, b.later(attended, 1), cp - 2)
    b.edge(b.later(attended, cp - 2), last)
    b.edge(b.later(arrived, cp - 2), last)
    return last


def _blocking_ring(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int, accompanied: str) -> Ids:
    """Add a ring whose every step begins with an op of the host."""
    cp, message = ranks.shape[1], keys.message(("cp_pass_kv", kind))
    place = np.arange(cp)
    following = ranks[:, (place + 1) % cp]
    # What the next step waits for, and where the block that is sent on came from.
    waits, held = [ready], ready
    for step in range(cp):
        sync = b.compute(ranks, keys.duration(("ring_sync", kind)), "sync", step)
        for pred in waits:
            b.edge(pred, sync)
        name = accompanied if step < cp - 1 else "ring_step"
        attended = b.compute(ranks, keys.duration((name, kind)), "attention", step)
        b.edge(sync, attended)
        if step < cp - 1:
            sent = b.flow(ranks, following, message, "cp_pass_kv", step, "send_recv")
            b.edge(held, sent)
            b.edge(sync, sent)
            held = sent[:, place - 1]
            waits = [attended, held]
    return attended
