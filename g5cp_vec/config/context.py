"""Context parallelism as vLLM and vllm-ascend deploy it: what is legal, and how many ranks share a cache.

*Prefill context parallelism* (``pcp``) adds ranks and splits new tokens over them; *decode context parallelism*
(``dcp``) adds none and splits the cache over ranks of a tensor-parallel group, which would hold it several times
otherwise. Two semantics are deployed:

- ``multiplicative`` (vllm-ascend's first runner): the cache is split over ``pcp * dcp`` ranks; a dcp group is ``dcp``
  consecutive ranks of a tp group, whatever ``pcp`` is.
- ``orthogonal`` (vLLM's second runner): the cache is split over ``dcp`` ranks. Without pcp they are consecutive in a tp
  group; with it they are the pcp group (``dcp = pcp``) or all ``tp * pcp`` ranks, or there is no split (``dcp = 1``).

Sparse and linear attention have rules of their own (`g5cp_vec.config.context_kinds`).

Sources of the rules: the parallel-config checks and user guides of both projects (vllm-ascend v0.13 to v0.23; vLLM's
second runner, pull request 46570).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config._nearest import divisors, nearest
from g5cp_vec.config.attention import Attention, Linear
from g5cp_vec.config.context_kinds import (
    MERGED,
    MULTIPLICATIVE,
    ORTHOGONAL,
    SHARDS,
    has_sparse,
    is_sparse_only,
    linear_form_obstacles,
    linear_obstacles,
    sparse_form_obstacles,
    sparse_obstacles,
    sparse_way,
)

Ints = NDArray[np.int64]

SEMANTICS = (MULTIPLICATIVE, ORTHOGONAL)
BLOCK_SIZE = 128
PASS_KV, ALLGATHER_KV, ALLGATHER_Q = "pass_kv", "allgather_kv", "allgather_q"
AG_RS, A2A, A2A_FP32 = "dcp_ag_rs", "dcp_a2a", "dcp_a2a_fp32"
ALL_TO_ALL, ALL_GATHER = "all_to_all", "all_gather"
DISPATCHES = (ALL_TO_ALL, ALL_GATHER)
DCP_FORMS = (AG_RS, A2A, A2A_FP32)
# Most rows into which cached context is gathered at once, by the project that deploys a semantics.
WORKSPACE_CAP_TOKENS = {"multiplicative": 131072, "orthogonal": 65536}
# Layouts that a refusal names.
_N_NEAREST = 3


def kv_shards(pcp: int, dcp: int, semantics: str) -> int:
    """Return the ranks that share one copy of a cache."""
    return pcp * dcp if semantics == "multiplicative" else dcp


def dcp_group(tp: int, pcp: int, dcp: int, semantics: str) -> str:
    """Return which ranks form a dcp group: ``tp`` (consecutive ones of a tp group), ``pcp``, or ``all`` of both."""
    if semantics == "multiplicative" or pcp == 1 or dcp == 1:
        return "tp"
    return "pcp" if dcp == pcp else "all"


def gather_workspace_tokens(max_model_len: Any, max_num_seqs: Any, block_size: int, cap_tokens: int) -> Any:
    """Return the rows of the buffer into which sharded context is gathered, segment by segment.

    Eight contexts of the longest length or four blocks a sequence, whichever is more, but no more than
    ``cap_tokens`` (vllm-ascend 131072, vLLM 65536), and at least one block a sequence. Integers or arrays of them.
    """
    wanted = np.maximum(8 * max_model_len, 4 * max_num_seqs * block_size)
    rows = np.maximum(np.minimum(wanted, cap_tokens), max_num_seqs * block_size)
    return rows if isinstance(rows, np.ndarray) else int(rows)


def segment_step_tokens(block_size: int, interleave: int, shards: int) -> int:
    """Return what a gathered segment of one context is a multiple of: whole blocks and whole turns of the ranks."""
    return math.lcm(block_size, interleave * shards)


def attention_obstacles(a: Attention, tp: int, pcp: int, dcp: int, semantics: str) -> Iterator[str]:
    """Yield why one kind of attention cannot be laid out so, the most telling reason first."""
    if pcp * dcp == 1:
        return
    if a.span in ("window", "chunk"):
        # Whole caches beside sharded ones are under way in vLLM (pull request 47541); see `context_kinds`.
        yield f"pcp = {pcp}, dcp = {dcp}: attention with a {a.span} is not deployed so, use pcp = dcp = 1 (or cp)"
        return
    if a.span == "sparse":
        yield from sparse_obstacles(tp, pcp, dcp, semantics)
    if dcp == 1:
        return
    if dcp_group(tp, pcp, dcp, semantics) != "tp":
        if dcp not in (pcp, tp * pcp):
            yield f"dcp = {dcp} with pcp = {pcp} is none of 1, pcp = {pcp}, tp*pcp = {tp * pcp} (orthogonal semantics)"
        elif a.kind == "gqa":
            yield f"dcp = {dcp} over pcp = {pcp} ranks (orthogonal semantics) is deployed for latent attention only"
        return
    if tp % dcp:
        yield f"dcp = {dcp} does not divide tp = {tp}"
        return
    if a.kind == "mla":
        return
    heads = f"{a.n_kv_heads} key/value heads"
    if tp <= a.n_kv_heads:
        yield f"dcp = {dcp} needs more tp ranks than {heads}, got tp = {tp}: no rank's cache is a copy of another's"
    elif dcp > tp // a.n_kv_heads:
        yield f"dcp = {dcp} exceeds the tp/kv = {tp}//{a.n_kv_heads} = {tp // a.n_kv_heads} copies of {heads}"
    elif a.n_heads // a.n_kv_heads % dcp:
        yield f"dcp = {dcp} does not divide the {a.n_heads // a.n_kv_heads} query heads of a key/value head"
    elif semantics == "multiplicative" and tp // a.n_kv_heads % dcp:
        yield f"dcp = {dcp} does not divide the tp/kv = {tp}//{a.n_kv_heads} = {tp // a.n_kv_heads} copies of {heads}"


def _fits_heads(mixer: Attention | Linear, tp: int) -> bool:
    if mixer.n_heads % tp:
        return False
    if isinstance(mixer, Linear):
        return mixer.n_key_heads % tp == 0
    return mixer.kind == "mla" or mixer.n_kv_heads % tp == 0 or tp % mixer.n_kv_heads == 0


def _obstacles_of(mixers: Sequence[Attention | Linear], tp: int, pcp: int, dcp: int, semantics: str) -> Iterator[str]:
    """Yield why a model with these mixers cannot be laid out so."""
    yield from linear_obstacles(mixers, pcp, semantics)
    for mixer in mixers:
        if isinstance(mixer, Attention):
            yield from attention_obstacles(mixer, tp, pcp, dcp, semantics)


def mixers_of(model: Any) -> tuple[Attention | Linear, ...]:
    """Return what mixes tokens in the layers of a model, each kind once."""
    return tuple(dict.fromkeys(kind.attention for kind in model.kinds[0] if kind.attention is not None))


@lru_cache(maxsize=256)
def legal_layouts(
    mixers: tuple[Attention | Linear, ...], n_chips: int, semantics: str
) -> tuple[tuple[int, int, int], ...]:
    """Return every legal (tp, pcp, dcp) on so many chips, ascending; what is left of them is dp.

    Data parallelism does not go with pcp, so ``tp * pcp = n_chips`` where pcp > 1. Only the heads decide here; what
    feed-forward widths and experts allow depends on ep as well.
    """
    found = []
    for tp in (n for n in range(1, n_chips + 1) if n_chips % n == 0):
        if not all(_fits_heads(mixer, tp) for mixer in mixers):
            continue
        for pcp in dict.fromkeys((1, n_chips // tp)):
            for dcp in (n for n in range(1, tp * pcp + 1) if (tp * pcp) % n == 0):
                if not any(_obstacles_of(mixers, tp, pcp, dcp, semantics)):
                    found.append((tp, pcp, dcp))
    return tuple(found)


def _nearest(mixers: tuple[Attention | Linear, ...], n_chips: int, tp: int, pcp: int, dcp: int, semantics: str) -> str:
    """Name the legal layouts that differ least, in factors of their degrees; most context parallelism first."""

    def distance(layout: tuple[int, int, int]) -> tuple[float, int]:
        apart = sum(abs(math.log2(a / b)) for a, b in zip(layout, (tp, pcp, dcp), strict=True))
        return apart, -layout[1] * layout[2]

    found = sorted(legal_layouts(mixers, n_chips, semantics), key=distance)[:_N_NEAREST]
    if not found:
        return "no (tp, pcp, dcp) is legal on so many chips"
    return "nearest legal (tp, pcp, dcp): " + ", ".join(map(str, found))


def nearest_layouts(chosen: Mapping[str, Any]) -> str:
    """Name the legal layouts that are nearest to what was chosen."""
    tp, pcp, dcp, semantics = (chosen[key] for key in ("tp", "pcp", "dcp", "cp_semantics"))
    return _nearest(mixers_of(chosen["model"]), chosen["n_chips"] // chosen["pp"], tp, pcp, dcp, semantics)


def context_obstacles(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield what forbids the context parallelism of a combination, defaults filled in."""
    dp, tp, pp, cp, pcp, dcp = (chosen[key] for key in ("dp", "tp", "pp", "cp", "pcp", "dcp"))
    yield from _form_obstacles(chosen)
    if pcp * dcp == 1:
        return
    degrees = f"pcp = {pcp}" if pcp > 1 else f"dcp = {dcp}"
    if cp > 1:
        yield f"cp = {cp} and {degrees} are two ways to split a context: use cp = 1 with pcp and dcp"
    if chosen["path"] == "math":
        yield f'the analytic path has no context parallelism, got {degrees}: use path = "g5" or pcp = dcp = 1'
    if pcp > 1 and dp > 1:
        yield f"dp = {dp} with pcp = {pcp} is not deployed: use dp = 1"
    if pcp > 1 and chosen["tp_sp"]:
        yield f"tp_sp = true and pcp = {pcp} both split the sequence: use tp_sp = false or pcp = 1"
    semantics = chosen["cp_semantics"]
    if pcp > 1 and pp > 1 and semantics == "orthogonal":
        yield f"pp = {pp} with pcp = {pcp} is not deployed with orthogonal semantics: use pp = 1"
    if semantics == MULTIPLICATIVE and has_sparse(chosen["model"]) and chosen["interleave"] != chosen["block_size"]:
        written = f"interleave = {chosen['interleave']}, block_size = {chosen['block_size']}"
        yield f"{written}: sparse attention shares a cache by whole blocks, leave interleave out or make it as long"
    if (block_size := chosen["block_size"]) % (interleave := chosen["interleave"]):
        others = nearest("interleave", interleave, divisors(block_size))
        yield f"interleave = {interleave} does not divide block_size = {block_size}{others}"
    mixers = mixers_of(chosen["model"])
    for reason in _obstacles_of(mixers, tp, pcp, dcp, semantics):
        yield f"{reason}; {nearest_layouts(chosen)}"


def _form_obstacles(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield what forbids the form of attention."""
    cp, pcp, dcp, semantics = (chosen[key] for key in ("cp", "pcp", "dcp", "cp_semantics"))
    prefill, decode = chosen["prefill_form"], chosen["decode_form"]
    softmax = [kind.softmax for kind in chosen["model"].kinds[0] if kind.softmax is not None]
    if cp > 1 and prefill in (ALLGATHER_KV, ALLGATHER_Q) and any(a.span != "full" for a in softmax):
        yield f'prefill_form = "{prefill}" of a cp group is built for full attention: use prefill_form = "pass_kv"'
    if cp * pcp * dcp > 1 and prefill == ALLGATHER_Q:
        if any(a.kind == "mla" for a in softmax) and not _gathers_sparse_queries(chosen):
            yield 'prefill_form = "allgather_q" is deployed for grouped-query attention: use "allgather_kv"'
        if pcp > 1 and semantics == "orthogonal":
            yield 'prefill_form = "allgather_q" with pcp > 1 needs multiplicative semantics: use "allgather_kv"'
    yield from sparse_form_obstacles(chosen)
    yield from linear_form_obstacles(chosen)
    if decode in DCP_FORMS and cp > 1 and pcp * dcp == 1:  # with them the degrees are at odds, whatever the form
        yield f'decode_form = "{decode}" acts on pcp and dcp, got cp = {cp}: use cp = 1, or decode_form = "pass_q"'
    if decode is None or pcp * dcp == 1:
        return
    if decode not in DCP_FORMS:
        yield f'decode_form = "{decode}" acts on a cp group, got pcp = {pcp}, dcp = {dcp}: use one of the dcp forms'
    elif decode == AG_RS and pcp > 1 and semantics == "multiplicative":
        yield (
            f'decode_form = "{decode}" does not merge over pcp = {pcp} with multiplicative semantics, deployed with '
            f'all-to-all and all-gather: use "{A2A_FP32}" or "{A2A}"'
        )
    elif decode == A2A_FP32 and pcp > 1 and dcp > 1 and semantics == "orthogonal":
        yield (
            f'decode_form = "{decode}" over pcp = {pcp} is not deployed with orthogonal semantics, which vllm-ascend '
            f'refuses with dcp: use "{AG_RS}" or "{A2A}"'
        )
    elif decode == A2A and pcp > 1 and dcp > 1 and semantics == "orthogonal":
        heads = [a.n_heads // chosen["tp"] for a in softmax if a.n_heads // chosen["tp"] % pcp]
        if heads:
            yield f'decode_form = "{decode}": pcp = {pcp} does not divide the {heads[0]} heads of a rank: use "{AG_RS}"'


def refused_loads(
    dep: Any, seq_len: Ints, batch: Ints, cached_tokens: Ints, chunk_tokens: Ints
) -> list[tuple[int, str]]:
    """Return which loads a deployment cannot prefill with what is cached, or in passes, and why.

    Parameters
    ----------
    dep : Deployment
    seq_len, batch, cached_tokens, chunk_tokens : ndarrays of int64, shape (n,)

    Returns
    -------
    list of (position, reason)
    """
    if dep.phase != "prefill" or not dep.is_sharded:
        return []
    shards, refused = dep.kv_shards, (cached_tokens > 0) | (chunk_tokens > 0)
    if has_sparse(dep.model) and sparse_way(dep.cp_semantics, dep.pcp, dep.dcp, "prefill") == SHARDS:
        return _short_prompts(dep.pcp, seq_len - cached_tokens, chunk_tokens)
    if dep.prefill_form == PASS_KV:
        reason = (
            f'prefill_form = "pass_kv" rings over pcp = {dep.pcp} ranks, but {shards} share the cached context: '
            'use "allgather_kv" or "allgather_q", or cached_tokens = 0'
        )
        return [] if shards == dep.pcp else [(at, reason) for at in np.flatnonzero(refused).tolist()]
    if dep.prefill_form != ALLGATHER_KV or shards == 1 or not gathers_segments(dep.model):
        return []
    step = segment_step_tokens(dep.block_size, dep.interleave, shards)
    # The first pass with something in the cache is the one with least room.
    first_end = np.where(cached_tokens > 0, cached_tokens + chunk_tokens, 2 * chunk_tokens)
    seq_len = np.where(chunk_tokens > 0, np.minimum(first_end, seq_len), seq_len)
    longest, most = dep.max_model_len or seq_len, dep.max_num_seqs or batch
    rows = gather_workspace_tokens(longest, most, dep.block_size, WORKSPACE_CAP_TOKENS[dep.cp_semantics]) + 0 * batch
    few = np.flatnonzero(refused & (rows // batch < step)).tolist()
    return [
        (
            at,
            f"batch = {batch[at]}: cached contexts are gathered over {shards} ranks in segments of at least {step} "
            f"tokens each, and the workspace of {rows[at]} tokens has room for {rows[at] // step} of them",
        )
        for at in few
    ]


def _short_prompts(pcp: int, new: Ints, chunk_tokens: Ints) -> list[tuple[int, str]]:
    """Refuse what every rank would compute: prompts that leave a chunk of the head-tail split empty."""
    last = np.where(chunk_tokens > 0, (new - 1) % np.maximum(chunk_tokens, 1) + 1, new)
    fewest = np.where(chunk_tokens > 0, np.minimum(last, np.minimum(chunk_tokens, new)), new)
    empty = np.flatnonzero((2 * pcp - 1) * -(-fewest // (2 * pcp)) >= fewest).tolist()
    return [
        (
            at,
            f"{fewest[at]} new tokens in a pass leave some of the 2*pcp = {2 * pcp} chunks of a prompt empty: sparse "
            "attention with dcp then computes them on every rank, which is not modelled: use more tokens, or dcp = 1",
        )
        for at in empty
    ]


def default_prefill_form(chosen: Mapping[str, Any]) -> str:
    """Return the form of a point that names none: with pcp keys and values are gathered; see the module on dcp.

    With dcp alone, cached context is met as deployed: grouped queries go to it, latents come. Queries of sparse
    attention go where the chosen tokens are, with orthogonal semantics.
    """
    if chosen["pcp"] > 1:
        return ALLGATHER_KV
    if chosen["dcp"] > 1:
        goes = prefers_gathered_queries(chosen["model"]) or _gathers_sparse_queries(chosen)
        return ALLGATHER_Q if goes else ALLGATHER_KV
    return PASS_KV


def _gathers_sparse_queries(chosen: Mapping[str, Any]) -> bool:
    """Whether the queries of a prefill go to the tokens that they choose."""
    way = sparse_way(chosen["cp_semantics"], chosen["pcp"], chosen["dcp"], "prefill")
    return way == MERGED and is_sparse_only(chosen["model"])


def prefers_gathered_queries(model: Any) -> bool:
    """Whether a model's queries are gathered rather than its cached keys and values: grouped-query attention."""
    return all(kind.softmax.kind == "gqa" for kind in model.kinds[0] if kind.softmax is not None)


def gathers_segments(model: Any) -> bool:
    """Whether some layer attends all of a cached context."""
    return any(kind.softmax is not None and kind.softmax.span == "full" for kind in model.kinds[0])


def default_interleave(chosen: Mapping[str, Any], block_size: int) -> int:
    """Return the run length of a point that names none: a token, or a block (vllm-ascend) where attention is sparse."""
    return block_size if chosen["cp_semantics"] == MULTIPLICATIVE and has_sparse(chosen["model"]) else 1


def default_dispatch(pcp: int) -> str:
    """Return how tokens come to experts where nothing is said: under pcp as both projects deploy it."""
    return ALL_GATHER if pcp > 1 else ALL_TO_ALL


def default_decode_form(chosen: Mapping[str, Any], otherwise: str) -> str:
    """Return the form of a point that names none."""
    if chosen["pcp"] * chosen["dcp"] == 1:
        return otherwise
    return A2A_FP32 if chosen["cp_semantics"] == "multiplicative" else AG_RS
