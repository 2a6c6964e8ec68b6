"""Prefill with linear attention over a split sequence: states are gathered, tokens stay (LASP-2, arXiv:2502.07563).

Every rank sums up each of its two chunks on its own: the state that the chunk would leave behind, and how it changes
the state before it. All of these are gathered; every rank then combines them in the order of the chunks, starts each of
its own from the state before it, and goes through its tokens. A convolution first needs the last taps of the chunk
before: they come from its rank, and are sent as if every chunk had at least as many tokens as there are taps.

What earlier passes have left travels no more: the rank of the last chunk is that of the next pass's first one, whose
summary begins with it.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.mapping.collectives import all_gather
from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Ids
from g5cp_vec.mapping.ranks import from_groups, groups_along


def states(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int, *, taps: bool, collective: str) -> Ids:
    """Add the taps' sends, the chunks' states, their gathering, and the pass over the tokens.

    Parameters
    ----------
    b, ranks, ready, keys, kind
        See the package docstring.
    taps : bool
        Whether there is a convolution.
    collective : {"ring", "direct"}
    """
    cp = ranks.shape[1]
    summed = b.compute(ranks, keys.duration(("states", kind)), "attention")
    b.edge(ready, summed)
    if taps:
        message = keys.message(("cp_taps", kind))
        # Chunk r comes after chunk r - 1 of rank r - 1, chunk 2 cp - 1 - r after 2 cp - 2 - r of rank r + 1.
        for src, dst in ((slice(0, cp - 1), slice(1, cp)), (slice(1, cp), slice(0, cp - 1))):
            sent = b.flow(ranks[:, src], ranks[:, dst], message, "cp_halo")
            b.edge(ready[:, src], sent)
            b.edge(sent, summed[:, dst])
    message = keys.message(("cp_states", kind))
    gathered = all_gather(b, groups_along(ranks, 1), [groups_along(summed, 1)], message, "cp_gather", collective)
    passed = b.compute(ranks, keys.duration(("scan", kind)), "attention")
    b.edge(summed, passed)
    for ids in gathered:
        arrived = from_groups(ids, ranks.shape, 1)
        if not np.array_equal(arrived, summed):
            b.edge(arrived, passed)
    return passed
