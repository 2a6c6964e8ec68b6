"""Where each token of a context lives when its KV cache is sharded over ranks, and how many tokens each rank holds.

A context is cut into *virtual blocks* of ``block_size * kv_shards`` tokens; a virtual block is one block of
``block_size`` tokens on every rank of the group. Inside it, runs of ``interleave`` tokens are dealt to the ranks in
turn. A rank's tokens stay in order and without gaps, so that its shard is an ordinary paged cache, only shorter. Which
ranks form the group (prefill or decode context parallelism, or both) is no matter here: they are shards 0, 1, 2, ….

Counts are functions of integers or of int64 arrays over points, which broadcast; `KVLayout` places single tokens.
Source of the arithmetic: the developer guides of vLLM and vllm-ascend on context parallelism (virtual blocks, slot
mapping), and the slot mapping of their block tables.

Not modelled: kernel blocks smaller than the blocks of the cache (the same answer whenever ``interleave`` divides
them), sliding windows, which token of a shared block is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from g5cp_vec.config.context import gather_workspace_tokens, segment_step_tokens
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.load import Count, ceil_div

__all__ = [
    "KVLayout", "Placement", "allocated_tokens_per_shard", "blocks_per_shard", "gather_workspace_tokens",
    "gathered_segment_tokens", "longest_shard_tokens", "prefix_granularity_tokens", "reusable_prefix_tokens",
    "shard_tokens",
]  # fmt: skip

NOT_OWNED = -1


def shard_tokens(context_len: Count, shard: Count, kv_shards: Count, interleave: Count) -> Count:
    """Return the tokens of a context that one shard holds.

    Of ``context_len // interleave`` whole runs the shard has every ``kv_shards``-th, and of the rest, if it is next
    in turn, the rest. Shard 0 never holds fewer than another one.

    Parameters
    ----------
    context_len : int or ndarray
        Tokens of the context, 0 or more.
    shard : int or ndarray
        From 0 to ``kv_shards - 1``.
    kv_shards, interleave : int or ndarray

    Returns
    -------
    int or ndarray of int64
        Tokens; over all shards they sum to ``context_len``.
    """
    runs = context_len // interleave
    return ceil_div(runs - shard, kv_shards) * interleave + (runs % kv_shards == shard) * (context_len % interleave)


def longest_shard_tokens(context_len: Count, kv_shards: Count, interleave: Count) -> Count:
    """Return the tokens of a context on the shard that holds most, at most ``interleave`` more than any other."""
    return shard_tokens(context_len, 0, kv_shards, interleave)


def prefix_granularity_tokens(kv_shards: Count, block_size: Count) -> Count:
    """Return the tokens of a virtual block: what the prefix cache keeps, finds and counts in."""
    return block_size * kv_shards


def reusable_prefix_tokens(shared_tokens: Count, kv_shards: Count, block_size: Count) -> Count:
    """Return how much of a shared prefix the prefix cache can serve: its whole virtual blocks."""
    granularity = prefix_granularity_tokens(kv_shards, block_size)
    return shared_tokens // granularity * granularity


def blocks_per_shard(context_len: Count, kv_shards: Count, block_size: Count) -> Count:
    """Return the blocks that every shard allocates for a context: its virtual blocks, the last one whole.

    All shards allocate equally many, those too that hold nothing of the last virtual block.
    """
    return ceil_div(context_len, prefix_granularity_tokens(kv_shards, block_size))


def allocated_tokens_per_shard(context_len: Count, kv_shards: Count, block_size: Count) -> Count:
    """Return the tokens for which every shard allocates memory: its blocks times ``block_size``.

    Times the KV bytes of a token and layer, this is the memory of one request on one rank and layer.
    """
    return blocks_per_shard(context_len, kv_shards, block_size) * block_size


class Placement(NamedTuple):
    """Where tokens live: int64 arrays of the shape of the tokens asked for.

    Attributes
    ----------
    virtual_block : ndarray
        Entry of the request's block table.
    offset_in_virtual_block : ndarray
    target_rank : ndarray
        Shard that holds the token.
    local_offset : ndarray
        Place inside the block of that shard.
    """

    virtual_block: NDArray[np.int64]
    offset_in_virtual_block: NDArray[np.int64]
    target_rank: NDArray[np.int64]
    local_offset: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A way to shard a KV cache.

    Attributes
    ----------
    kv_shards : int
        Ranks that share one context.
    block_size : int
        Tokens of a block on one rank.
    interleave : int
        Tokens dealt to a rank before the next one's turn; divides ``block_size``.

    Raises
    ------
    InfeasibleError
        If a size is below 1, or ``interleave`` does not divide ``block_size``.
    """

    kv_shards: int
    block_size: int = 128
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise InfeasibleError(f"{name} = {getattr(self, name)}: expected an integer of at least 1")
        if self.block_size % self.interleave:
            raise InfeasibleError(
                f"block_size = {self.block_size}, interleave = {self.interleave}: the interleave must divide the "
                "block size, so that no run of tokens straddles two blocks; change one of them"
            )

    @property
    def virtual_block_tokens(self) -> int:
        """Tokens of a virtual block, also the granularity of the prefix cache."""
        return self.block_size * self.kv_shards

    def place(self, tokens: ArrayLike) -> Placement:
        """Return where tokens live, given their positions in the context (int64, any shape, 0 or more)."""
        positions = np.asarray(tokens, np.int64)
        virtual_block, offset = np.divmod(positions, self.virtual_block_tokens)
        run, within_run = np.divmod(offset, self.interleave)
        turn, rank = np.divmod(run, self.kv_shards)
        return Placement(virtual_block, offset, rank, turn * self.interleave + within_run)

    def slots(self, tokens: ArrayLike, block_table: ArrayLike, rank: int) -> NDArray[np.int64]:
        """Return the slot mapping of one rank: where it writes each token, `NOT_OWNED` for tokens of other ranks.

        Parameters
        ----------
        tokens : array_like of int64
            Positions in the context.
        block_table : array_like of int64, shape (n_virtual_blocks,)
            Physical block of each virtual block, the same on every rank.
        rank : int
        """
        where = self.place(tokens)
        slots = np.asarray(block_table, np.int64)[where.virtual_block] * self.block_size + where.local_offset
        return np.where(where.target_rank == rank, slots, NOT_OWNED)

    def tokens_per_rank(self, context_len: ArrayLike) -> NDArray[np.int64]:
        """Return the tokens each rank holds, shape (..., kv_shards) for contexts of shape (...)."""
        contexts = np.asarray(context_len, np.int64)[..., np.newaxis]
        lengths: NDArray[np.int64] = shard_tokens(contexts, np.arange(self.kv_shards), self.kv_shards, self.interleave)
        return lengths

    def tokens_of(self, rank: int, local_index: ArrayLike) -> NDArray[np.int64]:
        """Return the positions in the context of a rank's 0th, 1st, … token: the inverse of `place`."""
        run, within_run = np.divmod(np.asarray(local_index, np.int64), self.interleave)
        return (run * self.kv_shards + rank) * self.interleave + within_run

    def blocks(self, context_len: int) -> int:
        """Return the blocks that each rank allocates for a context."""
        return int(blocks_per_shard(context_len, self.kv_shards, self.block_size))


def gathered_segment_tokens(cached_tokens: ArrayLike, workspace_tokens: int, layout: KVLayout) -> NDArray[np.int64]:
    """Return the rows that a rank contributes to each round of gathering cached context (all-gather KV).

    The workspace is shared evenly by the requests that have context; one round takes so many tokens of each,
    rounded down to whole blocks and whole turns of the ranks. A rank's shard counts as long as the longest one.

    Parameters
    ----------
    cached_tokens : array_like of int64, shape (n_requests,)
        Context of each request before this step; requests without any take no share.
    workspace_tokens : int
        Rows of the buffer, see `gather_workspace_tokens`.
    layout : KVLayout

    Returns
    -------
    ndarray of int64, shape (n_rounds,)
        Sum over requests; empty when none has context.

    Raises
    ------
    InfeasibleError
        If the requests are too many for the workspace: not a single turn of the ranks fits for each.
    """
    contexts = np.asarray(cached_tokens, np.int64)
    contexts = contexts[contexts > 0]
    if len(contexts) == 0:
        return np.zeros(0, np.int64)
    turn = layout.interleave * layout.kv_shards
    step = segment_step_tokens(layout.block_size, layout.interleave, layout.kv_shards)
    segment = workspace_tokens // len(contexts) // step * step
    if segment == 0:
        raise InfeasibleError(
            f"{len(contexts)} requests with cached context share a gathering workspace of {workspace_tokens} tokens: "
            f"fewer than {step} for each, the least that can be gathered; run fewer at a time or make it larger"
        )
    shards = ceil_div(contexts, turn) * layout.interleave
    shard_segment = segment // layout.kv_shards
    rounds = np.arange(ceil_div(int(contexts.max()), segment))[:, np.newaxis]
    rows: NDArray[np.int64] = np.clip(shards - rounds * shard_segment, 0, shard_segment).sum(axis=1)
    return rows
