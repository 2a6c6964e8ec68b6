"""What sparse attention with a sharded cache promises (pcp, dcp): FLOPs, and bytes by collective.

Told apart by semantics and degrees alone; written from what vLLM and vllm-ascend gather, tensor by tensor.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.audit.messages import Collectives, Ints, Tokens, key_bytes, size_bytes, up
from g5cp_vec.config.attention import Attention
from g5cp_vec.config.deployment import Deployment

FP32 = INT32 = 4


def _chooses_on_shards(dep: Deployment) -> bool:
    """Whether keys of the indexer are sharded and queries go to them."""
    return dep.cp_semantics == "orthogonal" and dep.dcp > 1 and (dep.phase == "decode" or dep.pcp == 1)


def _held(dep: Deployment, context: int) -> list[int]:
    """Tokens on every shard: runs are dealt out in turn."""
    shards, run = dep.dcp * (dep.pcp if dep.cp_semantics == "multiplicative" else 1), dep.interleave or 1
    turns, rest = divmod(context, run * shards)
    last = np.bincount(np.arange(rest) // run, minlength=shards)
    return [turns * run + int(n) for n in last]


def _longest(dep: Deployment, tokens: Tokens) -> int:
    return max(_held(dep, tokens.context))


def attended_pairs_twice(dep: Deployment, tokens: Tokens, a: Attention, seen_twice: int) -> int:
    """Return twice the pairs of one head and sequence, over all ranks that attend for it.

    ``seen_twice`` are those of one rank that attends everything.
    """
    assert a.indexer is not None
    if dep.phase == "prefill":
        if not _chooses_on_shards(dep):
            return seen_twice
        return sum(up(held * seen_twice, tokens.context) for held in _held(dep, tokens.context))
    chosen = min(tokens.context, a.indexer.top_k)
    if _chooses_on_shards(dep) or dep.pcp == 1:
        return sum(2 * up(held * chosen, tokens.context) for held in _held(dep, tokens.context))
    # Everything is on every rank, and pcp ranks do the same.
    return 2 * dep.pcp * chosen


def scored_pairs_twice(dep: Deployment, tokens: Tokens) -> int:
    """Return twice the pairs of one head of the indexer and one sequence, over all ranks of a replica."""
    if dep.phase == "decode":
        copies = dep.tp * dep.pcp // (dep.dcp if _chooses_on_shards(dep) else 1)
        return copies * 2 * tokens.context
    twice = tokens.new * (2 * tokens.cached + tokens.new)
    if not _chooses_on_shards(dep):
        return dep.tp * twice
    return dep.tp // dep.dcp * sum(up(held * twice, tokens.context) for held in _held(dep, tokens.context))


def _new_keys(dep: Deployment, tokens: Tokens, a: Attention, c: Collectives, pcp: Ints, *, together: bool) -> None:
    """Gather what all ranks keep of new tokens."""
    latent, rotary = a.kv_lora_rank, a.qk_rope_head_dim
    for width in (latent + rotary,) if together else (latent, rotary):
        c.gather("pcp", pcp, size_bytes(tokens.per_rank * width, dep.kv_dtype))
    if a.indexer is not None and not a.indexer.shared:
        c.gather("pcp", pcp, size_bytes(tokens.per_rank * a.indexer.head_dim, dep.activation_dtype))


def _blocks(dep: Deployment, tokens: Tokens, a: Attention, c: Collectives, dcp: Ints, pcp: Ints) -> None:
    """Gather latents, rotary parts and keys of the indexer, each over a dcp group and then over pcp."""
    assert dep.block_size is not None
    assert a.indexer is not None
    n = tokens.batch * up(tokens.context, dep.block_size * dep.dcp * dep.pcp) * dep.block_size
    parts = [size_bytes(n * width, dep.kv_dtype) for width in (a.kv_lora_rank, a.qk_rope_head_dim)]
    whole = [size_bytes(dep.dcp * n * width, dep.kv_dtype) for width in (a.kv_lora_rank, a.qk_rope_head_dim)]
    if not a.indexer.shared:
        parts.append(n * key_bytes(a.indexer))
        whole.append(dep.dcp * n * key_bytes(a.indexer))
    for part, group in zip(parts, whole, strict=True):
        c.gather("dcp", dcp, part)
        c.gather("pcp", pcp, group)


def _candidates(dep: Deployment, rows: int, a: Attention, c: Collectives, dcp: Ints) -> None:
    """Gather scores and positions of what each shard chose."""
    assert a.indexer is not None
    if not a.indexer.shared:
        c.gather("dcp", dcp, (FP32 + INT32) * rows * a.indexer.top_k)


def sparse_decode(dep: Deployment, tokens: Tokens, a: Attention, c: Collectives, dcp: Ints, pcp: Ints) -> bool:
    """Add what choosing sends; return whether queries then go to shards as in full attention."""
    if dep.cp_semantics == "orthogonal":
        if dep.dcp > 1:
            _candidates(dep, tokens.batch, a, c, dcp)
        return dep.dcp > 1
    if dep.pcp > 1:
        _new_keys(dep, tokens, a, c, pcp, together=True)
        _blocks(dep, tokens, a, c, dcp, pcp)
        return False
    rows = tokens.batch * a.n_heads // dep.tp
    c.gather("dcp", dcp, size_bytes(rows * (a.kv_lora_rank + a.qk_rope_head_dim), dep.activation_dtype))
    c.exchange(dcp, size_bytes(rows * a.kv_lora_rank, dep.activation_dtype))
    c.exchange(dcp, FP32 * rows)
    return False


def sparse_prefill(dep: Deployment, tokens: Tokens, a: Attention, c: Collectives, dcp: Ints, pcp: Ints) -> None:
    """Add all that a prefill sends."""
    assert a.indexer is not None
    assert dep.block_size is not None
    width = a.kv_lora_rank + a.qk_rope_head_dim
    if dep.cp_semantics == "multiplicative" and dep.pcp > 1:
        _new_keys(dep, tokens, a, c, pcp, together=True)
        _blocks(dep, tokens, a, c, dcp, pcp)
    elif dep.cp_semantics == "multiplicative":
        blocks = tokens.batch * up(tokens.context, dep.block_size * dep.dcp)
        c.gather("dcp", dcp, size_bytes(blocks * dep.block_size * width, dep.kv_dtype))
    elif _chooses_on_shards(dep):
        rows = tokens.batch * tokens.new
        heads = rows * a.n_heads // dep.tp
        _candidates(dep, rows, a, c, dcp)
        c.gather("dcp", dcp, size_bytes(heads * width, dep.activation_dtype))
        c.gather("dcp", dcp, FP32 * heads * dep.dcp)
        c.scatter(dcp, size_bytes(heads * a.kv_lora_rank, dep.activation_dtype))
    else:
        _new_keys(dep, tokens, a, c, pcp, together=False)
        if dep.dcp > 1:
            rows = tokens.batch * _longest(dep, tokens)
            c.gather("dcp", dcp, size_bytes(rows * width, dep.activation_dtype))
            if not a.indexer.shared:
                c.gather("dcp", dcp, rows * key_bytes(a.indexer))
