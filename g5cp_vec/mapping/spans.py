"""Which keys a query sees, counted: pairs of tokens, and the tokens that one rank needs of another.

A query at position a (from 0, cached tokens included) sees the keys up to itself: all of them (full), the last w
(window), those of its chunk (chunk), or the k chosen ones (sparse). Pairs are counted *doubled*, in integers, with the
ends of what is seen split evenly: a query counts min(2a + 1, 2w) in a window, which makes S * w - w^2 / 2 pairs of S
tokens, and 2 (a mod c) + 1 in a chunk. Sparse attention sees as many pairs as a window of k.

Under context parallelism rank r computes chunks r and 2 cp - 1 - r of the 2 cp equal chunks of new tokens (head-tail
order), and holds an even share of the cached ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.attention import Attention
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.mapping.load import Count, Load, ceil_div, least, most, own_chunks, wide
from g5cp_vec.mapping.sharding import is_sharded_form, sharded_reach

# A form of attention that needs only some keys of other ranks, told by the first key that each chunk sees.
LOCAL_SPANS = ("window", "chunk")


def doubled_pairs(a: Attention, first: Count, last: Count, key: Count = 0) -> Count:
    """Twice the pairs of queries at positions [first, last) with the keys from ``key`` on, ``key`` <= ``first``."""
    return _doubled_from(a, last, key) - _doubled_from(a, first, key)


def _doubled_from(a: Attention, n: Count, key: Count) -> Count:
    """Twice the pairs of the queries [key, n) with the keys from ``key`` on; float64 for arrays."""
    n, key = wide(n), wide(key)
    if a.span == "chunk":
        assert a.chunk is not None
        inside = least(n, _chunk_end(key, a.chunk))
        return (inside - key) ** 2 + _whole_chunks(n, a.chunk) - _whole_chunks(inside, a.chunk)
    limit = a.window if a.indexer is None else a.indexer.top_k
    length = n - key
    seen = length if limit is None else least(length, limit)
    return seen * (2 * length - seen)


def _chunk_end(key: Count, chunk: int) -> Count:
    return -(-key // chunk) * chunk


def _whole_chunks(n: Count, chunk: int) -> Count:
    """Twice the pairs of the queries [0, n) with the keys of their chunks."""
    return n // chunk * chunk**2 + (n % chunk) ** 2


def visible_tokens(a: Attention, context: Count) -> Count:
    """Tokens of a context that the query after it (a decode step, counting itself in) sees."""
    if a.span == "window":
        return least(context, a.window)
    if a.span == "chunk":
        return (context - 1) % a.chunk + 1
    return context if a.indexer is None else least(context, a.indexer.top_k)


def kept_tokens(a: Attention, context: Count) -> Count:
    """Tokens of a context that stay in the cache: no more than a window or a chunk can ever show."""
    limit = a.window if a.window is not None else a.chunk
    return context if limit is None else least(context, limit)


# --- Under context parallelism ----------------------------------------------------------------------------------------


def chunk_length(load: Load, cp: int) -> Count:
    """Tokens of one of the 2 cp chunks."""
    return load.new // (2 * cp)


def chunk_start(load: Load, cp: int, chunk: int) -> Count:
    """Position of the first query of a chunk."""
    return load.cached + chunk * chunk_length(load, cp)


def first_key(a: Attention, load: Load, cp: int, chunk: int) -> Count:
    """Position of the first key that the queries of a chunk see."""
    start = chunk_start(load, cp, chunk)
    if a.span == "window":
        assert a.window is not None
        return most(start - (a.window - 1), 0)
    if a.span == "chunk":
        return start // a.chunk * a.chunk
    return 0 * start


def reach(a: Attention, load: Load, cp: int) -> NDArray[np.int64]:
    """First chunk whose keys each chunk needs, -1 for cached ones; shape (n_points, 2 cp)."""
    columns = []
    for chunk in range(2 * cp):
        key = np.atleast_1d(np.asarray(first_key(a, load, cp, chunk)))
        of_new = (key - load.cached) // chunk_length(load, cp)
        columns.append(np.where(key < load.cached, -1, of_new))
    return np.stack(np.broadcast_arrays(*columns), axis=-1).astype(np.int64)


def needed_of_cache(a: Attention, load: Load, cp: int, rank: int) -> Count:
    """Return the cached tokens that a rank's queries see."""
    needed: Count = 0
    for chunk in own_chunks(cp, rank):
        needed = most(needed, load.cached - first_key(a, load, cp, chunk))
    return needed


def needed_of_chunk(a: Attention, load: Load, cp: int, rank: int, chunk: int) -> Count:
    """Tokens of another rank's chunk that a rank's queries see: the last ones."""
    length = chunk_length(load, cp)
    end = chunk_start(load, cp, chunk) + length
    needed: Count = 0
    for own in own_chunks(cp, rank):
        if own > chunk:
            needed = most(needed, least(end - first_key(a, load, cp, own), length))
    return needed


def sent_tokens(a: Attention, load: Load, cp: int, src: int, dst: int) -> Count:
    """Tokens per sequence that ``src`` sends to ``dst``: of its two chunks, and its share of the cached ones."""
    new = sum(needed_of_chunk(a, load, cp, dst, chunk) for chunk in own_chunks(cp, src))
    return new + ceil_div(needed_of_cache(a, load, cp, dst), cp)


def received_tokens(a: Attention, load: Load, cp: int, rank: int) -> Count:
    """Tokens per sequence that a rank receives from all others: the sum of `sent_tokens`."""
    length = chunk_length(load, cp)
    head, tail = (chunk_start(load, cp, chunk) for chunk in own_chunks(cp, rank))
    of_head, of_tail = (most(first_key(a, load, cp, chunk), load.cached) for chunk in own_chunks(cp, rank))
    # What both chunks see comes once, what the rank projected itself not at all.
    both = most(head - of_tail, 0)
    own = most(least(head + length - of_tail, length), 0)
    new = (head - of_head) + (tail - of_tail) - both - own
    return new + (cp - 1) * ceil_div(needed_of_cache(a, load, cp, rank), cp)


def receives(a: Attention, load: Load, cp: int, rank: int) -> Any:
    """Whether a rank needs keys of others at all."""
    return received_tokens(a, load, cp, rank) > 0


def rank_pairs(a: Attention, load: Load, cp: int, rank: int) -> Count:
    """Doubled pairs of all queries of a rank."""
    length = chunk_length(load, cp)
    starts = [chunk_start(load, cp, chunk) for chunk in own_chunks(cp, rank)]
    return sum(doubled_pairs(a, start, start + length) for start in starts)


def own_pairs(a: Attention, load: Load, cp: int, rank: int) -> Count:
    """Doubled pairs of a rank's queries with the new keys that it projected itself; all pairs where it needs no other.

    Inside each of its two chunks, and of the later chunk's queries with the earlier chunk's keys.
    """
    length = chunk_length(load, cp)
    head, tail = (chunk_start(load, cp, chunk) for chunk in own_chunks(cp, rank))
    inside = doubled_pairs(a, head, head + length, head) + doubled_pairs(a, tail, tail + length, tail)
    between = doubled_pairs(a, tail, tail + length, head) - doubled_pairs(a, tail, tail + length, head + length)
    everything = rank_pairs(a, load, cp, rank)
    alone = receives(a, load, cp, rank)
    if isinstance(alone, np.ndarray):
        return np.where(alone, inside + between, everything)
    return inside + between if alone else everything


def structure_reach(dep: Deployment, load: Load) -> NDArray[np.int64]:
    """Return what of a load decides the structure: the reach of every layer kind that needs only some keys of others.

    Of attention with a sharded cache, a `g5cp_vec.mapping.sharding.Reach`.

    Returns
    -------
    reach : ndarray of int64, shape (n_points, n_numbers)
        No numbers where the structure depends on the deployment alone.
    """
    if is_sharded_form(dep):
        return sharded_reach(dep, load)
    n_points = len(load.new) if isinstance(load.new, np.ndarray) else 1
    parts = [np.zeros((n_points, 0), np.int64)]
    for kind in dep.model.kinds[0]:
        if is_local(dep, kind):
            assert kind.softmax is not None
            parts.append(np.broadcast_to(reach(kind.softmax, load, dep.cp), (n_points, 2 * dep.cp)))
        elif is_gathered(dep, kind):
            assert kind.softmax is not None
            parts.append(_n_short(kind.softmax, load, dep.cp, n_points))
    return np.concatenate(parts, axis=1)


def varies_with_load(dep: Deployment) -> bool:
    """Whether loads of a deployment may differ in structure: whether `structure_reach` has any numbers."""
    return is_sharded_form(dep) or any(is_local(dep, kind) or is_gathered(dep, kind) for kind in dep.model.kinds[0])


def is_local(dep: Deployment, kind: LayerKind) -> bool:
    """Whether a layer needs only some keys of other ranks (prefill; windows and chunks)."""
    a = kind.softmax
    return dep.phase == "prefill" and dep.cp > 1 and a is not None and a.span in LOCAL_SPANS


def is_gathered(dep: Deployment, kind: LayerKind) -> bool:
    """Whether a layer gathers all keys before it attends the chosen ones (prefill; sparse attention)."""
    a = kind.softmax
    return dep.phase == "prefill" and dep.cp > 1 and a is not None and a.span == "sparse"


def _n_short(a: Attention, load: Load, cp: int, n_points: int) -> NDArray[np.int64]:
    """Return how many ranks' first query sees fewer than the chosen keys: the costs of all others are equal."""
    assert a.indexer is not None
    short = [np.asarray(chunk_start(load, cp, rank) < a.indexer.top_k) for rank in range(cp)]
    return np.broadcast_to(np.sum(np.broadcast_arrays(*short), axis=0), (n_points,)).reshape(-1, 1).astype(np.int64)


def interior_rank(reach_of_chunks: tuple[int, ...], cp: int, rank: int) -> bool:
    """Whether a rank of a window's layer is like every other such: no start, no cache and no own chunk in its windows.

    The farthest chunk needed lies R chunks back. From one chunk more on, both ends of every window fall on new tokens.
    """
    farthest = max(chunk - first for chunk, first in enumerate(reach_of_chunks))
    return rank > farthest and 2 * cp - 2 - 2 * rank > farthest
