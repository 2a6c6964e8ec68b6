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
    return _ring(b, ranks, ready, keys, kind, "ring_step", blocking=False)


def pass_kv_blocking(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add the ring of a host that blocks before every step."""
    return _ring(b, ranks, ready, keys, kind, "ring_step", blocking=True)


def pass_kv_slowed(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add the ring of a chip whose attention a transfer slows down."""
    return _ring(b, ranks, ready, keys, kind, "slowed_ring_step", blocking=False)


def pass_kv_blocking_slowed(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add the ring of a host that blocks, on a chip whose attention a transfer slows down."""
    return _ring(b, ranks, ready, keys, kind, "slowed_ring_step", blocking=True)


def _ring(
    b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int, accompanied: str, *, blocking: bool
) -> Ids:
    """Add a ring; ``accompanied`` names the cost of a step during which a block is on its way, all but the last."""
    cp = ranks.shape[1]
    message = keys.message(("cp_pass_kv", kind))
    following = np.roll(ranks, -1, axis=1)
    # What the next attention waits for, and where the block that is sent on came from.
    waits, held = [ready], ready
    for step in range(cp):
        if blocking:
            sync = b.compute(ranks, keys.duration(("ring_sync", kind)), "sync", step)
            for pred in waits:
                b.edge(pred, sync)
            waits = [sync]
        name = accompanied if step < cp - 1 else "ring_step"
        attended = b.compute(ranks, keys.duration((name, kind)), "attention", step)
        for pred in waits:
            b.edge(pred, attended)
        if step < cp - 1:
            sent = b.flow(ranks, following, message, "cp_pass_kv", step, "send_recv")
            b.edge(held, sent)
            if blocking:
                b.edge(sync, sent)
            held = np.roll(sent, 1, axis=1)
            waits = [attended, held]
    return attended
