"""How the new tokens of a batch are split over the ranks of prefill context parallelism: the head-tail split.

A prefill of n tokens is cut into ``2 * pcp`` chunks of ``ceil(n / (2 * pcp))`` tokens; rank r computes the chunks r and
``2 * pcp - 1 - r``, so that causal work is the same on all ranks whenever ``2 * pcp`` divides n. Decode requests are
not split: every rank computes all their tokens. After the attention's tensors are gathered over the ranks, a restore
index brings their rows back into order. Two forms are deployed:

- *padded* (vllm-ascend's first runner): chunks keep their full length, so every rank has equally many tokens; requests
  stay in the order of the batch. The gathered buffer holds pads and ``pcp`` copies of the decode rows, which a mask
  takes out.
- *virtual batch* (vLLM's second runner): pads are dropped and each chunk is a row of its own. Rows that begin a context
  come last, all others keep their order. Ranks have different numbers of tokens; only for gathering all are padded to
  the largest.

All chunks of a batch are arrays of shape (pcp, n_requests, 2): a head and a tail for each request on each rank. Token
positions count from the first new token of a request.

Not modelled: prompts that continue (a chunk that begins the new tokens counts as beginning the context), sharding of
decode requests over ranks, the linear split of hybrid models. The arithmetic holds at ``pcp = 1`` as well, where it
pads to an even length; deployments without prefill context parallelism do not split at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.load import chunk_tokens

# Indices into a batch are int32 in the frameworks; and causal pairs of so many tokens fit into int64.
MOST_BATCH_TOKENS = 2**31 - 1

Int64s = NDArray[np.int64]


class Row(NamedTuple):
    """Tokens ``start`` to ``stop - 1`` of one request: a chunk of a prefill, or a whole decode request."""

    request: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class BatchSplit:
    """One batch, split over the ranks; made by `split_batch`.

    Attributes
    ----------
    tokens : ndarray of int64, shape (n_requests,)
        New tokens per request, decode requests first.
    n_decodes : int
    pcp : int
    starts, lengths : ndarray of int64, shape (pcp, n_requests, 2)
        First position and padded length of head and tail; a decode request is a head of all its tokens.
    real_lengths : ndarray of int64, shape (pcp, n_requests, 2)
        Lengths without pads.
    """

    tokens: Int64s
    n_decodes: int
    pcp: int
    starts: Int64s
    lengths: Int64s
    real_lengths: Int64s

    @property
    def decode_tokens(self) -> int:
        """Tokens of all decode requests, which every rank computes."""
        return int(self.tokens[: self.n_decodes].sum())

    @cached_property
    def real_tokens(self) -> Int64s:
        """Tokens that each rank computes, without pads, with its copy of the decode tokens; shape (pcp,)."""
        total: Int64s = self.real_lengths.sum(axis=(1, 2))
        return total

    @cached_property
    def causal_pairs(self) -> Int64s:
        """(query, key) pairs among the new tokens with key not after query, by the rank of the query; shape (pcp,)."""
        lengths = self.real_lengths
        pairs: Int64s = (lengths * self.starts + lengths * (lengths + 1) // 2).sum(axis=(1, 2))
        return pairs

    # ---- the padded form ----

    @property
    def padded_lengths(self) -> Int64s:
        """Rows of each request in the gathered buffer, pads and copies included; shape (n_requests,)."""
        return self.pcp * self.padded_lengths_per_rank

    @cached_property
    def padded_lengths_per_rank(self) -> Int64s:
        """Rows of each request on every rank; shape (n_requests,). Their sum is a rank's share of a gather."""
        per_rank: Int64s = self.lengths[0].sum(axis=1)
        return per_rank

    @property
    def pad_tokens(self) -> Int64s:
        """Pads that each rank computes; shape (pcp,)."""
        pads: Int64s = self.padded_lengths_per_rank.sum() - self.real_tokens
        return pads

    def padded_positions(self, rank: int) -> list[Int64s]:
        """Return the positions that a rank computes, head and tail, one array a request; pads continue the count."""
        positions = _ranges(self.starts[rank], self.lengths[rank])
        return np.split(positions, np.cumsum(self.padded_lengths_per_rank)[:-1])

    def padded_restore_index(self) -> Int64s:
        """Return the rows of the gathered buffer (rank after rank) in order: request by request, then by position.

        The copies of a decode request follow each other rank by rank.
        """
        first_rows = np.cumsum(self.padded_lengths) - self.padded_lengths
        places = self.starts + first_rows[:, np.newaxis]
        ranks = np.arange(self.pcp)[:, np.newaxis]
        places[:, : self.n_decodes, 0] += ranks * self.tokens[: self.n_decodes]
        return _inverse(_ranges(places, self.lengths))

    def padded_unpad_mask(self) -> NDArray[np.bool_]:
        """Return which rows are kept after restoring: a prefill's tokens, and every pcp-th row of the decode requests.

        With one token a decode request, that is the copy of rank 0. With several (speculative decoding) it is still
        every pcp-th row, as deployed, and the caller has to sort out which copies these are.
        """
        mask = _ranges(np.zeros_like(self.tokens), self.padded_lengths) < np.repeat(self.tokens, self.padded_lengths)
        n_decode_rows = self.pcp * self.decode_tokens
        mask[:n_decode_rows] = np.arange(n_decode_rows) % self.pcp == 0
        return mask

    # ---- the virtual batch ----

    @property
    def gather_rows(self) -> int:
        """Rows that every rank brings to a gather in the virtual batch: those of the rank that has most."""
        return int(self.real_tokens.max())

    @property
    def kv_gather_rows(self) -> int:
        """Rows that every rank brings when new keys and values are gathered: the decode rows stay at home."""
        return self.gather_rows - self.decode_tokens

    def virtual_rows(self, rank: int) -> list[Row]:
        """Return the rows of a rank in the virtual batch, in order."""
        request, start, length = (column[rank] for column in self._sorted_rows)
        columns = (request, start, start + length)
        return [Row(*row) for row in zip(*(column[length > 0].tolist() for column in columns), strict=True)]

    def virtual_restore_index(self) -> Int64s:
        """Return the rows of the gathered buffer (`gather_rows` a rank) in the order of the batch, each token once.

        Decode tokens are taken from rank 0.
        """
        request, start, length = self._sorted_rows
        first_tokens = np.cumsum(self.tokens) - self.tokens
        ranks = np.arange(self.pcp)[:, np.newaxis]
        gathered = ranks * self.gather_rows + np.cumsum(length, axis=1) - length
        kept = np.where((request >= self.n_decodes) | (ranks == 0), length, 0)
        restore = np.empty(int(self.tokens.sum()), np.int64)
        restore[_ranges(first_tokens[request] + start, kept)] = _ranges(gathered, kept)
        return restore

    @cached_property
    def _sorted_rows(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return request, start and real length of each rank's rows in order, shape (pcp, 2 * n_requests)."""
        shape = (self.pcp, 2 * len(self.tokens))
        request = np.broadcast_to(np.repeat(np.arange(len(self.tokens)), 2), shape)
        start = self.starts.reshape(shape)
        begins_context = (start == 0) & (request >= self.n_decodes)
        order = np.argsort(begins_context, axis=1, kind="stable")
        columns = (request, start, self.real_lengths.reshape(shape))
        request, start, length = (np.take_along_axis(column, order, axis=1) for column in columns)
        return request, start, length


def split_batch(tokens: Sequence[int] | Int64s, pcp: int, n_decodes: int = 0) -> BatchSplit:
    """Split a batch over the ranks of prefill context parallelism.

    Parameters
    ----------
    tokens : sequence of int
        New tokens per request.
    pcp : int
        Ranks.
    n_decodes : int
        So many requests, the first ones, are decode requests.

    Returns
    -------
    BatchSplit

    Raises
    ------
    InfeasibleError
        If there is no request, a count is below 1, there are more decode requests than requests, or the batch has more
        than `MOST_BATCH_TOKENS` tokens.
    """
    new = np.asarray(tokens, np.int64)
    if len(new) == 0 or new.min() < 1:
        raise InfeasibleError("tokens: expected at least one request, and at least 1 token for each")
    if pcp < 1:
        raise InfeasibleError(f"pcp = {pcp}: expected an integer of at least 1")
    if not 0 <= n_decodes <= len(new):
        raise InfeasibleError(
            f"decodes = {n_decodes}: expected 0 to {len(new)}, because tokens has {len(new)} requests and the first "
            "ones are the decode requests"
        )
    if sum(new.tolist()) > MOST_BATCH_TOKENS:
        raise InfeasibleError(f"tokens: a batch of more than {MOST_BATCH_TOKENS} tokens; take fewer")
    chunk = chunk_tokens(new, pcp)
    chunk[:n_decodes] = new[:n_decodes]
    ranks = np.arange(pcp)[:, np.newaxis]
    starts = np.stack([ranks * chunk, (2 * pcp - 1 - ranks) * chunk], axis=2)
    lengths = np.broadcast_to(chunk[:, np.newaxis], starts.shape).copy()
    starts[:, :n_decodes] = 0
    lengths[:, :n_decodes, 1] = 0
    real_lengths = np.clip(new[:, np.newaxis] - starts, 0, lengths)
    return BatchSplit(new, n_decodes, pcp, starts, lengths, real_lengths)


def _ranges(starts: Int64s, lengths: Int64s) -> Int64s:
    """Return ``start, start + 1, …`` of each range, one after the other."""
    starts, lengths = starts.ravel(), lengths.ravel()
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)


def _inverse(permutation: Int64s) -> Int64s:
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation))
    return inverse
