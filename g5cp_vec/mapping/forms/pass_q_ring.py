"""Decode over a ring: queries travel, K/V stays, and one all-to-all brings the results home (arXiv:2411.01783).

Every rank owns the tokens of ceil(batch / cp) sequences (padded, where there are too few of them) and runs the whole
layer for them; the KV cache of every sequence is spread over the group. The queries go once round the ring. Each rank
attends its own shard for the queries it holds, cp times; then the partial outputs return to their owners with their
log-sum-exp in a single all-to-all, and are merged there. Of a window or chunk a shard is its share of what is seen;
with sparse attention an owner scores, and its choice goes along with its queries.

With one stream (``decode_serial``) a transfer waits for the attention before it as well: nothing overlaps.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.mapping.collectives import direct_exchange
from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Ids
from g5cp_vec.mapping.ranks import from_groups, groups_along


def pass_q_ring(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add cp partial attentions, cp - 1 query sends, cp - 1 returns and a merge per rank."""
    return _ring(b, ranks, ready, keys, kind, serial=False)


def pass_q_ring_serial(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add the ring of a step that runs on one stream."""
    return _ring(b, ranks, ready, keys, kind, serial=True)


def _ring(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int, *, serial: bool) -> Ids:
    cp = ranks.shape[1]
    duration, query = keys.duration(("ring_partial", kind)), keys.message(("cp_pass_q_ring", kind))
    following = np.roll(ranks, -1, axis=1)
    attended = b.compute(ranks, duration, "attention", 0)
    b.edge(ready, attended)
    held = ready
    for step in range(1, cp):
        sent = b.flow(ranks, following, query, "cp_pass_q", step - 1, "send_recv")
        b.edge(held, sent)
        if serial:
            b.edge(attended, sent)
        held = np.roll(sent, 1, axis=1)
        before, attended = attended, b.compute(ranks, duration, "attention", step)
        b.edge(before, attended)
        b.edge(held, attended)
    merge = keys.duration(("ring_merge", kind))
    groups, done = groups_along(ranks, 1), groups_along(attended, 1)
    returned = direct_exchange(b, groups, [done], keys.message(("cp_reduce_ring", kind)), "cp_reduce", 0, "all_to_all")
    merged = b.compute(ranks, merge, "merge")
    b.edge(attended, merged)
    for arrived in returned:
        b.edge(from_groups(arrived, ranks.shape, 1), merged)
    return merged
