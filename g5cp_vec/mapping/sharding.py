"""How deployed context parallelism (pcp, dcp) lays a load over ranks: rows, shards, segments, groups.

New tokens are split head-tail over the pcp ranks: rank r computes chunks r and 2 P - 1 - r of 2 P. With multiplicative
semantics a prompt is padded to a multiple of 2 P; with orthogonal ones pads are dropped, ranks hold different numbers
of tokens, and only what is gathered or computed in lock-step is padded to the fullest rank. Cached context lies in
shards, dealt out in runs of ``interleave`` tokens (`g5cp_vec.mapping.kv_layout`). Where it is gathered, it comes in
segments, as many tokens of every sequence as the workspace has room for.

The same forms serve a cp group, which is split like pcp ranks with one token a turn and no segments.

Ranks that hold fewer tokens project, and send to experts, as many as the fullest. Nothing but experts sees it: the
fullest rank has most pairs to attend too, so that all wait for it at every gathering, and pads are fewer than 2 P a
sequence, which is what experts may be given too many of.

Simplifications: an engine that says nothing else is configured for exactly its load (``max_model_len`` is the context,
``max_num_seqs`` the batch), sequences of a batch are equally long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.context import (
    ALLGATHER_KV,
    ALLGATHER_Q,
    PASS_KV,
    WORKSPACE_CAP_TOKENS,
    gather_workspace_tokens,
    gathers_segments,
)
from g5cp_vec.config.context import segment_step_tokens as step_tokens
from g5cp_vec.config.context_kinds import has_sparse, sparse_way
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.mapping.kv_layout import blocks_per_shard, shard_tokens
from g5cp_vec.mapping.load import Count, Load, ceil_div, chunk_bounds, least, most, own_chunks, wide
from g5cp_vec.mapping.ranks import from_groups, groups_along

Ids = NDArray[Any]


def is_sharded_form(dep: Deployment) -> bool:
    """Whether attention is distributed by a deployed form: gathered, not passed around a ring."""
    if dep.phase == "decode":
        return dep.is_sharded
    return dep.sequence_ranks * dep.dcp > 1 and dep.prefill_form != PASS_KV


def is_padded(dep: Deployment) -> bool:
    """Whether new tokens are padded to whole chunks, so that all ranks have equally many."""
    return dep.cp_semantics != "orthogonal"


# --- New tokens -------------------------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """Head and tail of one rank, as positions among the new tokens of a sequence: [start, stop) each."""

    head: tuple[Count, Count]
    tail: tuple[Count, Count]

    @property
    def tokens(self) -> Count:
        """Tokens of both."""
        return self.head[1] - self.head[0] + self.tail[1] - self.tail[0]

    @property
    def doubled_pairs(self) -> Count:
        """Twice the pairs with the keys of new tokens, a query seeing half of itself; float64 for arrays."""
        return doubled_causal(*self.head) + doubled_causal(*self.tail)


def doubled_causal(start: Count, stop: Count) -> Count:
    """Twice the pairs of the queries [start, stop) with all keys up to themselves."""
    return wide(stop) * wide(stop) - wide(start) * wide(start)


def chunks_of(new: Count, ranks: int, rank: int) -> Chunks:
    """Return the tokens that a rank computes; all of them where there is one rank."""
    if ranks == 1:
        return Chunks((0 * new, new), (new, new))
    head, tail = own_chunks(ranks, rank)
    return Chunks(chunk_bounds(new, ranks, head), chunk_bounds(new, ranks, tail))


# --- Cached context ---------------------------------------------------------------------------------------------------


def context_tokens(load: Load) -> Count:
    """Tokens of a sequence that lie in the cache: the context before a prefill, the whole one in decode."""
    return load.cached


def context_on_shard(dep: Deployment, load: Load, shard: int) -> Count:
    """Return the tokens of a sequence's cached context on one shard."""
    return shard_tokens(context_tokens(load), shard, dep.kv_shards, dep.interleave or 1)


class Segments(NamedTuple):
    """Rounds in which the cached context of every sequence is gathered.

    Attributes
    ----------
    rounds : int or ndarray
        0 without context.
    tokens : int or ndarray
        Of one sequence in every round but the last.
    shard_rows : int or ndarray
        Rows of one sequence that every shard contributes to a round.
    last_tokens, last_shard_rows : int or ndarray
        Of the last round: what is left, and rows as if every shard were as long as the longest.
    """

    rounds: Count
    tokens: Count
    shard_rows: Count
    last_tokens: Count
    last_shard_rows: Count


def sparse_way_of(dep: Deployment) -> str:
    """Return which way the sparse attention of a deployment with pcp or dcp goes."""
    assert dep.cp_semantics is not None
    return sparse_way(dep.cp_semantics, dep.pcp, dep.dcp, dep.phase)


def workspace_tokens(dep: Deployment, seq_len: Count, batch: Count) -> Count:
    """Return the rows of the gathering workspace of an engine as it is configured, for its load if nothing is said."""
    assert dep.cp_semantics is not None
    assert dep.block_size is not None
    longest, most_sequences = dep.max_model_len or seq_len, dep.max_num_seqs or batch
    return gather_workspace_tokens(longest, most_sequences, dep.block_size, WORKSPACE_CAP_TOKENS[dep.cp_semantics])


def segments(dep: Deployment, load: Load) -> Segments:
    """Return how cached context is gathered; one round, nothing gathered, where every rank has all of it."""
    context = context_tokens(load)
    if not dep.is_sharded or dep.kv_shards == 1:
        some = 1 * (context > 0)
        return Segments(some, context, context, context, context)
    assert dep.interleave is not None
    assert dep.block_size is not None
    shards, turn = dep.kv_shards, dep.interleave * dep.kv_shards
    step = step_tokens(dep.block_size, dep.interleave, shards)
    seq_len = context + load.new_unpadded
    # A load for which not even one step fits is refused; here it must only not divide by zero.
    tokens = most(workspace_tokens(dep, seq_len, load.batch) // load.batch // step * step, step)
    rounds = ceil_div(context, tokens)
    before = most(rounds - 1, 0)
    shard_rows = tokens // shards
    longest = ceil_div(context, turn) * dep.interleave
    return Segments(rounds, tokens, shard_rows, context - before * tokens, longest - before * shard_rows)


def chosen_on_shard(dep: Deployment, load: Load, top_k: int, shard: int) -> Count:
    """Return the tokens of a shard that a decode step attends of the ``top_k`` chosen: spread like the context is."""
    held, context = context_on_shard(dep, load, shard), context_tokens(load)
    return least(held, ceil_div(held * least(context, top_k), most(context, 1)))


def whole_context(dep: Deployment, load: Load) -> Count:
    """Return the tokens of a sequence at the end of a pass, nothing padded: those that it caches too."""
    return context_tokens(load) + (load.new_unpadded if dep.phase == "prefill" else 0)


def gathered_blocks(dep: Deployment, load: Load) -> Count:
    """Return the blocks that each shard contributes where all that requests refer to are gathered."""
    assert dep.block_size is not None
    return load.batch * blocks_per_shard(whole_context(dep, load), dep.kv_shards, dep.block_size)


def longest_shard(dep: Deployment, load: Load) -> Count:
    """Return the tokens of a sequence on the shard that holds most, those of this pass with them."""
    return shard_tokens(whole_context(dep, load), 0, dep.kv_shards, dep.interleave or 1)


def part_on_shard(dep: Deployment, load: Load, n: Count, shard: int) -> Count:
    """Return a shard's part of ``n`` things that are spread like a sequence's whole context is, rounded up.

    ``n`` as it is counted: an integer, an int64 array, or float64 (pairs, which products may not overflow).
    """
    context = whole_context(dep, load)
    held = shard_tokens(context, shard, dep.kv_shards, dep.interleave or 1)
    times, rest = n // context, n % context
    part = ceil_div(wide(rest) * held, context)
    return times * held + (part.astype(np.int64) if isinstance(n, np.ndarray) and n.dtype == np.int64 else part)


# --- What of a load decides the structure -----------------------------------------------------------------------------


class Reach(NamedTuple):
    """What of a load decides the structure of sharded attention.

    Attributes
    ----------
    rounds : int
        Of gathering cached context; 1 where queries are gathered and there is context.
    n_longer, has_rest : int
        Shards that hold a run more than the last one, and whether the next one holds part of a run: the costs of all
        others are equal.
    is_ragged : int
        Whether ranks have different numbers of new tokens.
    """

    rounds: int
    n_longer: int
    has_rest: int
    is_ragged: int

    def shard_class(self, shard: int, shards: int) -> int:
        """Return the shard whose costs stand for those of ``shard``."""
        if shard < self.n_longer:
            return 0
        return shard if self.has_rest and shard == self.n_longer else shards - 1


def _goes_to_choice(dep: Deployment) -> bool:
    """Whether queries of a prefill go to what they choose of the whole context: all that sparse attention does then."""
    return dep.phase == "prefill" and dep.prefill_form == ALLGATHER_Q and has_sparse(dep.model)


def sharded_reach(dep: Deployment, load: Load) -> NDArray[np.int64]:
    """Return the `Reach` of every point, shape (n_points, 4)."""
    tokens = whole_context(dep, load) if _goes_to_choice(dep) else context_tokens(load)
    context = np.atleast_1d(np.asarray(tokens, np.int64))
    runs, rest = np.divmod(context, dep.interleave or 1)
    n_longer, has_rest = runs % dep.kv_shards, (rest > 0) & (dep.kv_shards > 1)
    ragged = np.zeros_like(context)
    gathers_keys = dep.phase == "prefill" and dep.prefill_form == ALLGATHER_KV
    if dep.phase == "decode":
        rounds = np.ones_like(context)
    elif not gathers_keys:
        rounds = (context > 0).astype(np.int64)
    elif dep.cp > 1 or not gathers_segments(dep.model):
        # The ranks' shares of the context come along with the new tokens', or blocks of the whole cache do.
        rounds = np.zeros_like(context)
    else:
        rounds = np.asarray(segments(dep, load).rounds, np.int64) + 0 * context
    if gathers_keys:
        n_longer, has_rest = 0 * context, has_rest & False
    if dep.phase == "prefill" and not is_padded(dep):
        ragged = (np.asarray(load.new, np.int64) % (2 * dep.pcp) != 0) & (dep.pcp > 1) & (context >= 0)
    columns = np.broadcast_arrays(rounds, n_longer, has_rest, ragged)
    return np.stack(columns, axis=-1).astype(np.int64)


# --- Groups of ranks --------------------------------------------------------------------------------------------------


class Groups(NamedTuple):
    """Ranks of a stage, shape (dp, P, tp), seen as groups.

    Attributes
    ----------
    which : {"tp", "pcp", "all"}
        ``size`` consecutive ranks of a tp group, the ranks of equal place in their tp groups, or all ranks of a
        replica, the latter two in the order of the pcp axis first.
    size : int
    """

    which: str
    size: int

    def split(self, ids: Ids) -> Ids:
        """Return chips or ops per group, shape (n_groups, size)."""
        if self.which == "pcp":
            return groups_along(ids, 1)
        if self.which == "all":
            return ids.transpose(0, 2, 1).reshape(ids.shape[0], -1)
        return ids.reshape(-1, self.size)

    def join(self, groups: Ids, shape: tuple[int, ...]) -> Ids:
        """Undo `split`."""
        if self.which == "pcp":
            return from_groups(groups, shape, 1)
        if self.which == "all":
            dp, pcp, tp = shape
            return groups.reshape(dp, tp, pcp).transpose(0, 2, 1)
        return groups.reshape(shape)


def shard_numbers(dcp_group: str, semantics: str | None, pcp: int, tp: int, dcp: int) -> NDArray[np.int64]:
    """Return the shard that each rank of a replica holds, shape (P, tp)."""
    place, member = np.arange(pcp)[:, None], np.arange(tp)[None, :]
    if semantics == "orthogonal":
        if dcp_group == "pcp":
            numbers = place + 0 * member
        else:
            numbers = member * pcp + place if dcp_group == "all" else member % dcp + 0 * place
    else:
        numbers = place * dcp + member % dcp
    return numbers.astype(np.int64)
