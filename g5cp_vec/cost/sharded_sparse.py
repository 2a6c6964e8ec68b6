"""Exact FLOPs, bytes and messages of sparse attention with a sharded cache (`g5cp_vec.mapping.forms.sparse`).

Beside messages of `g5cp_vec.cost.sharded` (``pcp_kv``, ``dcp_q``, ``dcp_lse``, ``dcp_out``, ``dcp_a2a``):

=======================  =====================================================================================
message                  bytes
=======================  =====================================================================================
``pcp_index``            new keys of the indexer of a rank's rows, as projected (they are quantised into the cache)
``dcp_blocks``           blocks of a shard that requests refer to, whole latents (``replicated``)
``dcp_*_blocks``         the same of latents, rotary parts and keys of the indexer, each by itself (``blocks``)
``pcp_*_blocks``         what a dcp group made of them
``dcp_index_shard``      a shard's keys of the indexer, the longest shard's many (``shards``)
``dcp_shard``            a shard's latents, widened to the activation type before they are sent (``shards``)
``dcp_choice``           a rank's candidates of all rows: a score and a position, four bytes each (``merged``)
=======================  =====================================================================================

A rank of ``merged`` scores all rows against the keys of its shard, and attends of the chosen tokens what its shard
holds: as much of them as of the context, rounded up. Of the whole batch at once; vLLM cuts a prefill so that scores,
and gathered shards, fit its workspaces: the same bytes in more calls. vLLM runs ``merged`` and ``shards`` with caches
in fp8; another type is priced by its bytes.

Passes over memory: gathered keys put in order and into the cache, blocks or a shard copied out of it, candidates packed
and merged, partial outputs rescaled.
"""

from __future__ import annotations

from g5cp_vec.config.attention import Attention
from g5cp_vec.config.context_kinds import BLOCKS, MERGED, REPLICATED, SHARDS, WHOLE
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.cost.parts import OpParts, Part
from g5cp_vec.cost.products import memory
from g5cp_vec.cost.sharded import Widths, sharded_parts
from g5cp_vec.cost.sparse import CHOICE_BYTES, SCORE_BYTES, all_pairs, chosen_core, rows_read, scoring
from g5cp_vec.mapping.load import Count, Load, least, most, wide
from g5cp_vec.mapping.sharding import (
    chunks_of,
    doubled_causal,
    gathered_blocks,
    longest_shard,
    part_on_shard,
    sparse_way_of,
    whole_context,
)
from g5cp_vec.mapping.spans import doubled_pairs, visible_tokens
from g5cp_vec.mapping.sparse_memory import CANDIDATE_BYTES

SPARSE_MESSAGES = (
    "pcp_index", "dcp_blocks", "dcp_latent_blocks", "pcp_latent_blocks", "dcp_rope_blocks", "pcp_rope_blocks",
    "dcp_index_blocks", "pcp_index_blocks", "dcp_index_shard", "dcp_shard", "dcp_choice",
)  # fmt: skip


# --- Messages ---------------------------------------------------------------------------------------------------------


def sparse_message(dep: Deployment, load: Load, kind: LayerKind, name: str) -> Count:
    """Return the bytes of a message; see the module."""
    a = kind.softmax
    assert a is not None
    assert a.indexer is not None
    assert dep.block_size is not None
    if name == "pcp_index":
        return n_bytes(load.rank_tokens * a.indexer.head_dim, dep.activation_dtype)
    if name == "dcp_choice":
        return load.batch * _rows(dep, load) * a.indexer.top_k * CANDIDATE_BYTES
    if name == "dcp_index_shard":
        return load.batch * longest_shard(dep, load) * a.indexer.key_bytes
    if name == "dcp_shard":
        return n_bytes(load.batch * longest_shard(dep, load) * a.kv_elements(dep.tp), dep.activation_dtype)
    tokens = gathered_blocks(dep, load) * dep.block_size * (dep.dcp if name.startswith("pcp") else 1)
    if name == "dcp_blocks":
        return n_bytes(tokens * a.kv_elements(dep.tp), dep.kv_dtype)
    what = name.split("_")[1]
    if what == "index":
        return tokens * a.indexer.key_bytes
    return n_bytes(tokens * (a.kv_lora_rank if what == "latent" else a.qk_rope_head_dim), dep.kv_dtype)


def _rows(dep: Deployment, load: Load) -> Count:
    """Return the queries of a sequence on a rank that has all of them."""
    return load.new if dep.phase == "prefill" else 1


# --- Computes ---------------------------------------------------------------------------------------------------------


def sparse_parts(dep: Deployment, load: Load, kind: LayerKind, a: Attention, parts: OpParts) -> OpParts:
    """Return the parts of the ops of a layer, given those of its projections."""
    way = sparse_way_of(dep)
    if way == MERGED:
        return parts | _merged(dep, load, kind, a)
    if dep.phase == "prefill":
        return parts | _prefill(dep, load, a, way)
    if way == BLOCKS:
        return parts | _moves(dep, load, a, way) | _decode_of_blocks(dep, load, a)
    # Every rank has, and scores, all keys of the indexer.
    context = whole_context(dep, load)
    if a.scores is not None:
        parts["qkv"] = parts["qkv"] + scoring(dep, load, a.scores, 2 * wide(context), 1, context)
    return parts | sharded_parts(dep, load, kind, a)


def _prefill(dep: Deployment, load: Load, a: Attention, way: str) -> OpParts:
    """Price a rank's own rows over the whole context, wherever it came from."""
    parts = {} if way == REPLICATED else _moves(dep, load, a, way)
    ranks = dep.sequence_ranks
    for rank in range(ranks):
        chunks = chunks_of(load.new, ranks, rank)
        spans = [(load.cached + start, load.cached + stop) for start, stop in (chunks.head, chunks.tail)]
        parts[f"sparse@{rank}"] = [
            chosen_core(
                dep, load, a,
                heads=a.n_heads // dep.tp,
                doubled=sum(doubled_pairs(a, *span) for span in spans),
                rows=sum(rows_read(a, *span) for span in spans),
                q_tokens=chunks.tokens,
                kv_tokens=_most_chosen(a, load.context),
                kv_dtype=dep.activation_dtype if way == SHARDS else dep.kv_dtype,
            )
        ]  # fmt: skip
        if a.scores is not None:
            doubled = sum(doubled_causal(*span) for span in spans)
            parts[f"indexer@{rank}"] = scoring(dep, load, a.scores, doubled, chunks.tokens, load.context)
    return parts


def _most_chosen(a: Attention, context: Count) -> Count:
    assert a.indexer is not None
    return least(context, a.indexer.top_k)


def _decode_of_blocks(dep: Deployment, load: Load, a: Attention) -> OpParts:
    """Price one row of every sequence on every rank over the whole context, which has been gathered."""
    context = whole_context(dep, load)
    seen = visible_tokens(a, context)
    core = chosen_core(
        dep, load, a, heads=a.n_heads // dep.tp, doubled=2 * wide(seen), rows=seen, q_tokens=1, kv_tokens=seen
    )
    parts: OpParts = {"sparse@0": [core]}
    if a.scores is not None:
        parts["indexer@0"] = scoring(dep, load, a.scores, 2 * wide(context), 1, context)
    return parts


def _moves(dep: Deployment, load: Load, a: Attention, way: str) -> OpParts:
    """Price passes over memory: new keys into the cache, in order; blocks or a shard out of it."""
    assert a.indexer is not None
    assert dep.block_size is not None
    cached, rows = a.kv_elements(dep.tp), dep.pcp * load.rank_tokens
    into = [memory(dep, "restore", 2 * n_bytes(rows * cached, dep.kv_dtype))]
    keys = [memory(dep, "restore", 2 * n_bytes(rows * a.indexer.head_dim, dep.activation_dtype))]
    out: list[Part] = []
    if way == BLOCKS:
        tokens = gathered_blocks(dep, load) * dep.block_size
        out = [memory(dep, "restore", 2 * n_bytes(tokens * cached, dep.kv_dtype))]
        keys.append(memory(dep, "restore", 2 * tokens * a.indexer.key_bytes))
    elif way == SHARDS:
        tokens = load.batch * longest_shard(dep, load)
        widened = n_bytes(tokens * cached, dep.kv_dtype) + n_bytes(tokens * cached, dep.activation_dtype)
        out = [memory(dep, "restore", widened)]
        keys.append(memory(dep, "restore", 2 * tokens * a.indexer.key_bytes))
    else:
        assert way == WHOLE
    parts: OpParts = {"restore": into}
    if a.scores is not None:
        parts["restore_index"] = keys
    return parts | ({"select": out} if out else {})


def _merged(dep: Deployment, load: Load, kind: LayerKind, a: Attention) -> OpParts:
    """Choose of the keys on a shard, merge the candidates; all rows over what of their choice a shard holds."""
    assert a.indexer is not None
    parts: OpParts = {}
    rows, context = _rows(dep, load), whole_context(dep, load)
    candidates = load.batch * rows * a.indexer.top_k
    for shard in range(dep.kv_shards):
        if a.scores is None:
            break
        held = part_on_shard(dep, load, context, shard)
        pairs = 2 * wide(held) if dep.phase == "decode" else part_on_shard(dep, load, all_pairs(load), shard)
        # An empty shard is launched all the same: its duration is looked up as that of one token.
        scores = scoring(dep, load, a.scores, pairs, rows, most(held, 1))
        parts[f"indexer@{shard}"] = [*scores, memory(dep, "indexer", candidates * CANDIDATE_BYTES)]
    merged = candidates * (dep.dcp * CANDIDATE_BYTES + CHOICE_BYTES)
    parts["choose"] = [memory(dep, "indexer", merged)]
    if dep.phase == "decode":
        return parts | sharded_parts(dep, load, kind, a)
    w = Widths(dep, a)
    doubled, read = doubled_pairs(a, load.cached, load.context), rows_read(a, load.cached, load.context)
    for shard in range(dep.kv_shards):
        held = part_on_shard(dep, load, context, shard)
        parts[f"sparse@{shard}"] = [
            chosen_core(
                dep, load, a,
                heads=w.gathered_heads,
                doubled=part_on_shard(dep, load, doubled, shard),
                rows=part_on_shard(dep, load, read, shard),
                q_tokens=rows,
                kv_tokens=most(least(held, part_on_shard(dep, load, _most_chosen(a, context), shard)), 1),
            )
        ]  # fmt: skip
    outputs = n_bytes(load.batch * rows * w.gathered_heads * w.d_out, dep.activation_dtype)
    sums = load.batch * rows * w.gathered_heads * SCORE_BYTES
    return parts | {"rescale": [memory(dep, "merge", dep.dcp * sums + 2 * outputs)]}
