"""Prefill with sparse attention: the keys of the indexer are gathered, then the latents while it scores.

What a query attends is known only once it has scored every key of the context, so nothing can be attended before. A
layer that takes the choice of another gathers latents only. (As deployed in vllm-ascend: all-gather of indexer keys
and of latents over the group.)
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.mapping.collectives import all_gather
from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Handles, Ids
from g5cp_vec.mapping.ranks import from_groups, groups_along


def gathered(
    b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int, n_short: int, *, scores: bool, collective: str
) -> Ids:
    """Add the gathers, the scoring, and the attention over what was chosen.

    Parameters
    ----------
    b, ranks, ready, keys, kind
        See the package docstring.
    n_short : int
        Ranks whose first query sees fewer tokens than are chosen; the costs of the others are equal.
    scores : bool
        Whether the layer has an indexer of its own.
    collective : {"ring", "direct"}
    """
    cp = ranks.shape[1]
    chips = groups_along(ranks, 1)
    after = [groups_along(ready, 1)]
    before_attention = [ready]
    if scores:
        after = all_gather(b, chips, after, keys.message(("cp_keys", kind)), "cp_gather", collective)
        scored = b.compute(ranks, keys.duration(("indexer", kind)), "attention")
        b.edge(ready, scored)
        for ids in _distinct(after, ready, ranks.shape):
            b.edge(ids, scored)
        before_attention = [scored]
    # One communicator: latents follow keys.
    step = cp - 1 if collective == "ring" and scores else int(scores)
    arrived = all_gather(b, chips, after, keys.message(("cp_latents", kind)), "cp_gather", collective, step)
    attended: Handles = np.empty(ranks.shape, np.int64)
    for rank in range(min(n_short + 1, cp)):
        members = slice(rank, rank + 1 if rank < n_short else cp)
        attended[:, members] = b.compute(ranks[:, members], keys.duration((f"sparse@{rank}", kind)), "attention")
    for ids in before_attention + _distinct(arrived, ready, ranks.shape):
        b.edge(ids, attended)
    return attended


def _distinct(groups: list[Ids], ready: Ids, shape: tuple[int, ...]) -> list[Ids]:
    """Return what arrived per rank, without the ops that everything waits for anyway."""
    per_rank = [from_groups(ids, shape, 1) for ids in groups]
    return [ids for ids in per_rank if ids.flat[0] != ready.flat[0]]
