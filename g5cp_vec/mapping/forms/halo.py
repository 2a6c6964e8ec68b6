"""Prefill with windows or chunks of attention: a rank receives the keys that its queries see, and no others.

Every rank attends the keys that it projected itself while those of others are on their way, then the latter; a rank
that needs none does everything at once. Who needs something of whom depends on the lengths, so the first chunk that
each chunk of queries reaches back to is part of what decides the structure (`g5cp_vec.mapping.spans`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Handles, Ids
from g5cp_vec.mapping.load import own_chunks
from g5cp_vec.mapping.spans import interior_rank

Reach = tuple[int, ...]


def halo(b: BlockBuilder, ranks: Ids, ready: Ids, keys: CostKeys, kind: int, reach: Reach, *, uniform: bool) -> Ids:
    """Add one or two computes per rank and one send per pair of ranks that needs it.

    Parameters
    ----------
    b, ranks, ready, keys, kind
        See the package docstring.
    reach : tuple of int
        First chunk that each of the 2 cp chunks needs, -1 for cached tokens.
    uniform : bool
        Whether a key is seen for equally long by all queries (a window), so that costs far from both ends are equal.
    """
    cp = ranks.shape[1]
    stands_for = _representatives(reach, cp, uniform=uniform)
    own: Handles = np.empty(ranks.shape, np.int64)
    for first, members in _grouped(range(cp), stands_for.__getitem__).items():
        own[:, members] = b.compute(ranks[:, members], keys.duration((f"own@{first}", kind)), "attention")
    b.edge(ready, own)
    sent = _sends(reach, cp, uniform=uniform)
    arrived: dict[int, list[Ids]] = defaultdict(list)
    for (src, dst), pairs in sent.items():
        sources, targets = [s for s, _ in pairs], [d for _, d in pairs]
        message = keys.message((f"cp_halo@{src}>{dst}", kind))
        flows = b.flow(ranks[:, sources], ranks[:, targets], message, "cp_halo")
        b.edge(ready[:, sources], flows)
        for place, target in enumerate(targets):
            arrived[target].append(flows[:, place])
    attended = own.copy()
    for first, members in _grouped(sorted(arrived), stands_for.__getitem__).items():
        attended[:, members] = b.compute(ranks[:, members], keys.duration((f"halo@{first}", kind)), "attention")
        for member in members:
            b.edge(own[:, member], attended[:, member])
            for flows in arrived[member]:
                b.edge(flows, attended[:, member])
    return attended


def _grouped(ranks: Iterable[int], key: Callable[[int], int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        groups[key(rank)].append(rank)
    return groups


def _representatives(reach: Reach, cp: int, *, uniform: bool) -> list[int]:
    """Return, for each rank, the first rank whose costs are the same at every load of the structure."""
    interior = [rank for rank in range(cp) if uniform and interior_rank(reach, cp, rank)]
    return [interior[0] if rank in interior else rank for rank in range(cp)]


@lru_cache(maxsize=8)
def _sends(reach: Reach, cp: int, *, uniform: bool) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Return the pairs (source, destination) by the first pair whose message is as long at every load."""
    farthest = max(chunk - first for chunk, first in enumerate(reach))
    alike: dict[object, tuple[int, int]] = {}
    sends: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for dst in range(cp):
        cached = any(reach[chunk] < 0 for chunk in own_chunks(cp, dst))
        for src in range(cp):
            needed = [
                min(chunk - of for chunk in own_chunks(cp, dst) if chunk > of and reach[chunk] <= of)
                for of in own_chunks(cp, src)
                if any(chunk > of and reach[chunk] <= of for chunk in own_chunks(cp, dst))
            ]
            if src == dst or not (needed or cached):
                continue
            # Chunks nearer than the farthest are needed whole, that one in part, whoever needs them.
            whole = sum(distance < farthest for distance in needed)
            look = (whole, len(needed) - whole, dst if cached else None) if uniform else (src, dst)
            first = alike.setdefault(look, (src, dst))
            sends[first].append((src, dst))
    return sends
