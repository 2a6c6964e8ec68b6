"""Decode over a flat group: queries travel, K/V stays (arXiv:2411.01783, pass-Q).

The owner (cp coordinate 0) sends its query, every rank attends its own KV shard, and the partial outputs come back
with their softmax maxima and denominators and are merged.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Ids


def pass_q(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int) -> Ids:
    """Add cp - 1 query sends, cp partial attentions, cp - 1 reduction sends and a merge at the owner.

    ``ready`` and the ids returned have the owners' shape (dp, 1, tp).
    """
    owners, others = ranks[:, :1], ranks[:, 1:]
    from_owner = np.broadcast_to(owners, others.shape)
    query = b.flow(from_owner, others, keys.message(("cp_pass_q", kind)), "cp_pass_q")
    b.edge(ready, query)
    partial = b.compute(ranks, keys.duration(("partial", kind)), "attention")
    b.edge(ready, partial[:, :1])
    b.edge(query, partial[:, 1:])
    reduction = b.flow(others, from_owner, keys.message(("cp_reduce", kind)), "cp_reduce")
    b.edge(partial[:, 1:], reduction)
    merge = b.compute(owners, keys.duration(("merge", kind)), "merge")
    b.edge(partial[:, :1], merge)
    b.edge(reduction, merge)
    return merge
