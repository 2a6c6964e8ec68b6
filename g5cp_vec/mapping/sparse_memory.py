"""Buffers of sparse attention with a sharded cache: what is gathered, exchanged and merged at the worst moment.

One layer's buffers at a time, each freed when the next gathering begins. The moments, by ways
(`g5cp_vec.config.context_kinds`): new keys of the indexer; new latents as they came, and in order; keys of the indexer
of other shards beside a rank's own copy (over a dcp group first, where there is pcp too); latents likewise; candidates
of all shards; queries and partial outputs. Scores are not counted: engines cut rows so that they fit a fixed workspace.
"""

from __future__ import annotations

from functools import reduce

from g5cp_vec.config.attention import Attention
from g5cp_vec.config.context_kinds import BLOCKS, MERGED, REPLICATED, SHARDS, WHOLE
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.mapping.load import Count, Load, most, prefilled_rows
from g5cp_vec.mapping.sharding import gathered_blocks, longest_shard, sparse_way_of

FP32_BYTES = 4
# Of a candidate: a score and a position.
CANDIDATE_BYTES = 8


def sparse_buffer_bytes(dep: Deployment, a: Attention, load: Load) -> Count:
    """Return the bytes of a layer's buffers at its worst moment; of a decode step only what choosing needs."""
    assert dep.block_size is not None
    way = sparse_way_of(dep)
    nothing = 0 * load.batch
    if way == REPLICATED:
        if dep.phase == "decode":
            return nothing
        tokens = gathered_blocks(dep, load) * dep.block_size * dep.kv_shards
        return n_bytes(tokens * a.kv_elements(dep.tp), dep.kv_dtype)
    if way == MERGED:
        return _merged(dep, a, load)
    if dep.phase == "decode" and way == WHOLE:
        return nothing
    moments = _new_keys(dep, a, load, copies=2 if way == BLOCKS else 1)
    if way == BLOCKS:
        moments += _blocks(dep, a, load)
    elif way == SHARDS:
        rows = load.batch * longest_shard(dep, load)
        moments.append(n_bytes(rows * a.kv_elements(dep.tp), dep.activation_dtype) * (1 + dep.dcp))
        if a.scores is not None:
            moments.append(rows * a.scores.key_bytes * (1 + dep.dcp))
    return reduce(most, moments)


def sends_decoded_queries(dep: Deployment) -> bool:
    """Whether a decode step exchanges queries and answers as full attention does."""
    return dep.phase == "decode" and sparse_way_of(dep) in (REPLICATED, MERGED)


def _new_keys(dep: Deployment, a: Attention, load: Load, copies: int) -> list[Count]:
    rows = dep.pcp * load.rank_tokens
    moments = [copies * n_bytes(rows * a.kv_elements(dep.tp), dep.kv_dtype)]
    if a.scores is not None:
        moments.append(copies * n_bytes(rows * a.scores.head_dim, dep.activation_dtype))
    return moments


def _blocks(dep: Deployment, a: Attention, load: Load) -> list[Count]:
    """Return moments of own blocks, a dcp group's and all: of latents; of rotary parts, all latents kept; of keys."""
    assert dep.block_size is not None
    tokens = gathered_blocks(dep, load) * dep.block_size
    at_once = 1 + (dep.dcp if dep.dcp > 1 else 0) + dep.kv_shards
    latents, rotary = (n_bytes(tokens * width, dep.kv_dtype) for width in (a.kv_lora_rank, a.qk_rope_head_dim))
    moments = [at_once * latents, dep.kv_shards * latents + at_once * rotary]
    if a.scores is not None:
        moments.append(at_once * tokens * a.scores.key_bytes)
    return moments


def _merged(dep: Deployment, a: Attention, load: Load) -> Count:
    assert a.indexer is not None
    rows = prefilled_rows(dep, load) if dep.phase == "prefill" else load.batch
    choosing = (1 + dep.dcp) * rows * a.indexer.top_k * CANDIDATE_BYTES * (a.scores is not None)
    if dep.phase == "decode":
        return choosing
    heads = rows * (a.n_heads // dep.tp) * dep.dcp
    queries = n_bytes(heads * (a.kv_lora_rank + a.qk_rope_head_dim), dep.activation_dtype)
    outputs = n_bytes(heads * a.kv_lora_rank, dep.activation_dtype)
    return most(choosing, queries + 2 * outputs + dep.dcp * heads * FP32_BYTES)
