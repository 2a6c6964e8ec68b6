"""What promises are made of: tokens of a pass, whole bytes, and messages between chips."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.attention import Indexer
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import DTYPE_BITS
from g5cp_vec.config.topology import Hgx

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
    if dep.phase == "decode":
        return Tokens(batch, 1, up(seq_len, dep.cp) * dep.cp, _owned(dep, batch), seq_len)
    new, cached = seq_len - cached_tokens, cached_tokens
    cp = dep.cp * dep.pcp
    if dep.pcp > 1 and dep.prefill_form != "pass_kv":
        # Whole chunks, or those of the prompt as it is; then the fullest rank counts.
        chunk = up(new, 2 * cp)
        if dep.cp_semantics == "multiplicative":
            # Beside linear attention a rank has a piece as it is, and chunks inside softmax attention alone.
            own = up(new, cp) if is_hybrid(dep) else 2 * chunk
            return Tokens(batch, 2 * cp * chunk, cached, batch * own, seq_len)
        lengths = [max(0, min(chunk, new - place * chunk)) for place in range(2 * cp)]
        fullest = max(lengths[rank] + lengths[-1 - rank] for rank in range(cp))
        return Tokens(batch, new, cached, batch * fullest, seq_len)
    if cp > 1:
        # Two equal chunks per rank, a head and a tail one; the cache is shared out evenly.
        new, cached = up(new, 2 * cp) * 2 * cp, up(cached, cp) * cp
    return Tokens(batch, new, cached, batch * new // cp, seq_len)


def is_hybrid(dep: Deployment) -> bool:
    """Whether some layer keeps a state."""
    return any(kind.linear is not None for kind in dep.model.layers)


def owners(dep: Deployment) -> int:
    """Return how many ranks of a cp or pcp group hold hidden states between layers: with pass-Q only coordinate 0."""
    return 1 if dep.decode_form == "pass_q" else dep.cp * dep.pcp


def _owned(dep: Deployment, batch: int) -> int:
    """Sequences whose tokens one rank holds in decode: ranks of a cp group share them, pcp ranks all hold all."""
    return batch if dep.pcp > 1 else up(batch, owners(dep))


def up(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def size_bytes(elements: int, dtype: str) -> int:
    """Return the whole bytes that hold so many elements."""
    return up(elements * DTYPE_BITS[dtype], 8)


def key_bytes(indexer: Indexer) -> int:
    """Return the bytes of an indexer's key of one token; of a narrow one with an fp32 scale for 128 elements."""
    scale = 4 * up(indexer.head_dim, 128) if indexer.dtype in ("fp8", "int8") else 0
    return size_bytes(indexer.head_dim, indexer.dtype) + scale


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


def gathered(dep: Deployment, kind: str, groups: Ints, n_bytes: int) -> Traffic:
    """All-gather (or reduce-scatter) over groups of a kind, each member contributing (or owning) ``n_bytes``."""
    if dep.algorithm(kind) == "direct":
        return everyone(groups, n_bytes)
    return around(groups, (groups.shape[-1] - 1) * n_bytes)


def halves(dep: Deployment, kind: str, groups: Ints, n_bytes: int) -> Traffic:
    """Reduce-scatter and all-gather, each member owning ``n_bytes`` of the result."""
    if dep.algorithm(kind) == "direct":
        return everyone(groups, 2 * n_bytes)
    return around(groups, 2 * (groups.shape[-1] - 1) * n_bytes)


def all_reduce(dep: Deployment, groups: Ints, n_bytes: int) -> list[Traffic]:
    """All-reduce ``n_bytes`` bytes over the last axis, as the runtime does it where groups span nodes evenly."""
    size = groups.shape[-1]
    way = dep.runtime.prefill_all_reduce if dep.phase == "prefill" else dep.runtime.decode_all_reduce
    per_node = _chips_per_node(dep, groups)
    if way == "flat" or per_node is None:
        return [halves(dep, "tp", groups, up(n_bytes, size))]
    by_node = groups.reshape(*groups.shape[:-1], size // per_node, per_node)
    if way == "rails":
        # per_node rings of a piece a step; a chip is the last of its node in one of them.
        steps, piece = 2 * (size - 1), up(n_bytes, size * per_node)
        beyond = np.roll(np.roll(by_node, -1, axis=-1), -1, axis=-2)
        return [around(by_node, steps * (per_node - 1) * piece), between(by_node, beyond, steps * piece)]
    owned, n_nodes = up(n_bytes, per_node), size // per_node
    across = around(np.swapaxes(by_node, -1, -2), 2 * (n_nodes - 1) * up(owned, n_nodes))
    return [around(by_node, 2 * (per_node - 1) * owned), across]


def _chips_per_node(dep: Deployment, groups: Ints) -> int | None:
    """Return how many consecutive members of every group share a node; None unless several nodes hold as many each."""
    if not isinstance(dep.topology, Hgx):
        return None
    nodes = (groups // dep.topology.used_per_node(dep.n_chips)).reshape(-1, groups.shape[-1])
    for per_node in range(2, nodes.shape[1]):
        if nodes.shape[1] % per_node == 0:
            first = nodes[:, ::per_node]
            distinct = all(len(set(row)) == len(row) for row in first.tolist())
            if distinct and (nodes == np.repeat(first, per_node, axis=1)).all():
                return per_node
    return None


class Collectives:
    """Traffic of collectives over groups of chips, shape (n_groups, size)."""

    def __init__(self, dep: Deployment) -> None:
        self.dep = dep
        self.traffic: list[Traffic] = []

    def gather(self, kind: str, groups: Ints, contributed: int) -> None:
        """All-gather over groups of a kind what every member contributes."""
        kind = "cp" if self.dep.cp > 1 else kind
        self.traffic.append(gathered(self.dep, kind, groups, contributed))

    def scatter(self, groups: Ints, chunk: int) -> None:
        """Reduce-scatter over dcp groups, a chunk for every member."""
        self.gather("dcp", groups, chunk)

    def reduce(self, groups: Ints, chunk: int) -> None:
        """All-reduce over dcp groups, every member owning a chunk."""
        self.traffic.append(halves(self.dep, "dcp", groups, chunk))

    def exchange(self, groups: Ints, for_each: int) -> None:
        """All-to-all, so much from each to each."""
        self.traffic.append(everyone(groups, for_each))
