"""What promises are made of: tokens of a pass, whole bytes, and messages between chips."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import DTYPE_BITS

Ints = NDArray[np.int64]


class Tokens(NamedTuple):
    """Tokens of one forward pass, padded as the context-parallel split demands.

    Attributes
    ----------
    batch : int
        Sequences of one replica.
    new, cached : int
        Tokens per sequence that are computed and that were computed before.
    per_rank : int
        Tokens that projections and FFN of one rank see.
    context : int
        Tokens per sequence at the end of the pass, nothing padded.
    """

    batch: int
    new: int
    cached: int
    per_rank: int
    context: int


class Traffic(NamedTuple):
    """``n_bytes`` bytes from ``src[i]`` to ``dst[i]``, for every i."""

    src: Ints
    dst: Ints
    n_bytes: int


def promised_tokens(dep: Deployment, seq_len: int, batch: int, cached_tokens: int) -> Tokens:
    """Return the tokens of a pass over ``seq_len`` tokens of context, ``cached_tokens`` of them cached."""
    cp = dep.cp
    if dep.phase == "decode":
        return Tokens(batch, 1, up(seq_len, cp) * cp, batch, seq_len)
    new, cached = seq_len - cached_tokens, cached_tokens
    if cp > 1:
        # Two equal chunks per rank, a head and a tail one; the cache is shared out evenly.
        new, cached = up(new, 2 * cp) * 2 * cp, up(cached, cp) * cp
    return Tokens(batch, new, cached, batch * new // cp, seq_len)


def up(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def size_bytes(elements: int, dtype: str) -> int:
    """Return the whole bytes that hold so many elements."""
    return up(elements * DTYPE_BITS[dtype], 8)


def hidden_bytes(dep: Deployment, tokens: int) -> int:
    """Return the bytes of so many hidden states."""
    return size_bytes(tokens * dep.model.hidden, dep.activation_dtype)


def between(src: Ints, dst: Ints, n_bytes: int) -> Traffic:
    """Send from each source to the destination at its place."""
    src, dst = np.broadcast_arrays(src, dst)
    return Traffic(src.ravel(), dst.ravel(), n_bytes)


def around(groups: Ints, n_bytes: int) -> Traffic:
    """Send from every member to the next; the members lie along the last axis."""
    return between(groups, np.roll(groups, -1, axis=-1), n_bytes)


def everyone(groups: Ints, n_bytes: int) -> Traffic:
    """Send from every member to every other; the members lie along the last axis."""
    size = groups.shape[-1]
    sender, receiver = np.nonzero(~np.eye(size, dtype=bool))
    return between(groups[..., sender], groups[..., receiver], n_bytes)


def halves(dep: Deployment, groups: Ints, n_bytes: int) -> Traffic:
    """Reduce-scatter and all-gather, each member owning ``n_bytes`` of the result."""
    if dep.collective == "direct":
        return everyone(groups, 2 * n_bytes)
    return around(groups, 2 * (groups.shape[-1] - 1) * n_bytes)
