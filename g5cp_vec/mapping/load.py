"""The load of a deployment in tokens: what is new, what is cached, what a rank holds.

Every field is an integer or an int64 array (one entry per point); the formulas that use it accept both, so the
same line prices a thousand points or counts one exactly in unbounded integers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from g5cp_vec.config.context import ALL_GATHER, PASS_KV
from g5cp_vec.config.context_kinds import has_linear
from g5cp_vec.config.deployment import Deployment

# An int, or an int64 array of shape (n_points,).
Count = Any


def ceil_div(a: Count, b: Count) -> Count:
    """Return a / b rounded up, for integers and integer arrays."""
    return -(-a // b)


def wide(count: Count) -> Count:
    """Return a count that products may not overflow: float64 for arrays, the unbounded integer itself otherwise."""
    return count.astype(np.float64) if isinstance(count, np.ndarray) else count


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of one forward pass.

    Attributes
    ----------
    batch : int or ndarray
        Sequences per replica.
    new, cached : int or ndarray
        Tokens per sequence that are computed, and that are in the KV cache before; padded when cp > 1: ``new`` to a
        multiple of 2 * cp (head-tail split), ``cached`` to a multiple of cp. In decode ``new`` is 1 and ``cached``
        is the context that the step attends. With pcp or dcp ``cached`` is padded in rings only, and ``new`` not with
        orthogonal semantics. Where pieces are contiguous (`is_contiguous`) that is what attention sees of them.
    new_unpadded, cached_unpadded : int or ndarray
    rank_tokens : int or ndarray
        Tokens that projections and FFN of one rank see: batch * new / (cp * pcp) in prefill (on the fullest rank,
        where they differ); in decode batch where one rank of a group owns all sequences or all ranks hold them,
        ceil(batch / cp) where every rank owns some.
    """

    batch: Count
    new: Count
    cached: Count
    new_unpadded: Count
    cached_unpadded: Count
    rank_tokens: Count

    @property
    def context(self) -> Count:
        """Tokens per sequence that are attended at the end of the pass (padded)."""
        return self.new + self.cached


def least(a: Count, b: Count) -> Count:
    """Return the smaller of two counts, entry by entry for arrays."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return min(a, b)


def most(a: Count, b: Count) -> Count:
    """Return the larger of two counts, entry by entry for arrays."""
    return -least(-a, -b)


def chunk_tokens(new: Count, ranks: Count) -> Count:
    """Return the tokens of one of the 2 * ranks chunks of a head-tail split; the last may be shorter or empty."""
    return ceil_div(new, 2 * ranks)


def own_chunks(ranks: int, rank: int) -> tuple[int, int]:
    """Return the chunks of new tokens that a rank computes in a head-tail split: a head and a tail."""
    return rank, 2 * ranks - 1 - rank


def chunk_bounds(new: Count, ranks: int, chunk: int) -> tuple[Count, Count]:
    """Return the new tokens [start, stop) of a chunk of a head-tail split without pads."""
    length = chunk_tokens(new, ranks)
    return least(chunk * length, new), least((chunk + 1) * length, new)


def fullest_rank_tokens(new: Count, ranks: int) -> Count:
    """Return the tokens of a sequence on the rank that has most of a head-tail split without pads."""
    fullest: Count = 0
    for rank in range(ranks):
        bounds = [chunk_bounds(new, ranks, chunk) for chunk in own_chunks(ranks, rank)]
        fullest = most(fullest, sum(stop - start for start, stop in bounds))
    return fullest


def is_contiguous(dep: Deployment) -> bool:
    """Whether the new tokens of a sequence are split into contiguous pieces, head-tail inside attention alone.

    So models with linear attention are, over pcp ranks.
    """
    return dep.phase == "prefill" and dep.pcp > 1 and has_linear(dep.model)


def build_load(dep: Deployment, seq_len: Count, batch: Count, cached_tokens: Count) -> Load:
    """Return the load of a deployment for a context of ``seq_len`` tokens, ``cached_tokens`` of them cached."""
    cp = dep.sequence_ranks
    if dep.phase == "decode":
        cp = dep.cp
        shard = ceil_div(seq_len, cp)
        owned = batch if dep.has_owner else ceil_div(batch, cp)
        return Load(batch, 1, shard * cp, 1, seq_len, owned)
    new = seq_len - cached_tokens
    if cp == 1:
        return Load(batch, new, cached_tokens, new, cached_tokens, batch * new)
    gathers = dep.pcp > 1 and dep.prefill_form != PASS_KV
    if gathers and dep.cp_semantics == "orthogonal":
        rank_tokens = batch * fullest_rank_tokens(new, cp)
        return Load(batch, new, cached_tokens, new, cached_tokens, rank_tokens)
    padded_new = chunk_tokens(new, cp) * (2 * cp)
    if gathers:
        own = ceil_div(new, cp) if is_contiguous(dep) else padded_new // cp
        return Load(batch, padded_new, cached_tokens, new, cached_tokens, batch * own)
    padded_cached = ceil_div(cached_tokens, cp) * cp
    return Load(batch, padded_new, padded_cached, new, cached_tokens, batch * (padded_new // cp))


def reserved_load(dep: Deployment, load: Load) -> Load:
    """Return a load with the tokens that a rank has memory for: those of its engine's largest step, if that says any.

    Where ranks split them, every sequence may be padded by a token in each of a rank's two chunks.
    """
    if dep.step_tokens is None:
        return load
    tokens = dep.step_tokens + 0 * load.batch
    if dep.sequence_ranks > 1:
        tokens = ceil_div(tokens, dep.sequence_ranks) + 2 * (dep.max_num_seqs or load.batch)
    return dataclasses.replace(load, rank_tokens=most(tokens, load.rank_tokens) if dep.phase == "decode" else tokens)


def prefilled_rows(dep: Deployment, load: Load) -> Count:
    """Return the rows of all ranks' new tokens at the places of chunks, or as many as memory is reserved for."""
    return most(load.batch * load.new, load.rank_tokens * dep.sequence_ranks)


def computed_expert_rows(dep: Deployment, load: Load) -> Count:
    """Return the rows that the experts of one rank compute, under balanced routing.

    Of all tokens at one (pp, cp) coordinate an ep-th, ``top_k`` times; where rows are exchanged, what is received.
    """
    assert dep.ep is not None
    if dep.moe_dispatch == ALL_GATHER:
        return ceil_div(dep.replicas * load.rank_tokens * dep.model.top_k, dep.ep)
    return dep.ep * expert_rows(dep, load)[0]


def expert_rows(dep: Deployment, load: Load) -> tuple[Count, Count]:
    """Return what expert parallelism moves: rows per message between two EP ranks, and tokens a rank gathers in.

    The dp * pcp * rank_tokens tokens at one (pp, cp) coordinate are shared by ep ranks; each sends its share, top_k
    times, evenly to all of them: rows = ceil(dp * pcp * tokens * top_k / ep^2). Where the ranks that split an expert
    span replicas, each contributes its tp-th of the replica's tokens to the gathering.
    """
    assert dep.ep is not None
    rows = ceil_div(dep.replicas * load.rank_tokens * dep.model.top_k, dep.ep * dep.ep)
    return rows, ceil_div(load.rank_tokens, dep.tp)
