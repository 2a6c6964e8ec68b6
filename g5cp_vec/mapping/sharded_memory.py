"""Buffers of attention with a sharded cache: what is gathered, exchanged and projected up at the worst moment.

One layer's buffers at a time: gathered keys and values are used and discarded. The moments of a prefill:

1. new keys and values: gathered over the ranks as they came, and in order; latents projected up beside.
2. a segment of cached context: a shard's rows, the rows of all shards as gathered (over a dcp group, then over pcp) and
   sorted by request, latents projected up beside. vLLM allocates its workspace whole, ``W (1 + 1 / dcp)`` rows.
3. queries of all ranks' rows and of a dcp group's heads, and the partial outputs that are exchanged and gathered.

In decode the third. Where pieces are contiguous (hybrid models) queries are gathered with keys and values, all lie at
the places of padded chunks once more, and outputs are gathered when the rest is gone. Linear attention then keeps the
transition after every 64 tokens of a piece and the one before, in fp32, with all ranks' states, transitions and
combined states. Not counted: buffers inside collective libraries.
"""

from __future__ import annotations

from g5cp_vec.config.attention import Attention, Linear
from g5cp_vec.config.context import A2A_FP32, AG_RS, ALLGATHER_KV, ALLGATHER_Q
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.mapping.load import Count, Load, ceil_div, is_contiguous, most, prefilled_rows
from g5cp_vec.mapping.sharding import context_tokens, is_padded, segments, workspace_tokens
from g5cp_vec.mapping.sparse_memory import FP32_BYTES, sends_decoded_queries, sparse_buffer_bytes

# Tokens that the delta rule takes at once.
DELTA_CHUNK = 64


def sharded_buffer_bytes(dep: Deployment, kind: LayerKind, load: Load) -> Count:
    """Return the bytes of a layer's buffers at its worst moment."""
    a = kind.softmax
    if a is None:
        return 0
    if a.span == "sparse":
        chosen = sparse_buffer_bytes(dep, a, load)
        return most(chosen, _exchanged_bytes(dep, a, load.batch)) if sends_decoded_queries(dep) else chosen
    if dep.phase == "decode":
        return _exchanged_bytes(dep, a, load.batch) if dep.kv_shards > 1 else 0 * load.batch
    rows = load.rank_tokens * dep.sequence_ranks
    if dep.cp > 1 and dep.prefill_form == ALLGATHER_KV:
        rows += load.batch * load.cached
    worst: Count = 0 * rows
    if is_contiguous(dep):
        worst = _contiguous_bytes(dep, a, load)
    elif dep.sequence_ranks > 1:
        own = rows // dep.sequence_ranks
        worst = 2 * n_bytes(rows * a.kv_elements(dep.tp), dep.kv_dtype) + _projected_up(dep, a, rows - own)
    if dep.prefill_form == ALLGATHER_KV and dep.is_sharded:
        worst = most(worst, _segment_bytes(dep, a, load))
    if dep.prefill_form == ALLGATHER_Q:
        exchanged = _exchanged_bytes(dep, a, prefilled_rows(dep, load)) * (context_tokens(load) > 0)
        # Gathered keys stay until the tail chunks have been attended.
        worst = worst + exchanged
    return worst


def _contiguous_bytes(dep: Deployment, a: Attention, load: Load) -> Count:
    """Return queries, keys and values of all pieces, as gathered and in padded chunks, or outputs of all ranks."""
    heads, padded = a.n_heads // dep.tp, prefilled_rows(dep, load)
    entered = (dep.pcp * load.rank_tokens + padded) * (heads * a.d_qk + a.kv_elements(dep.tp))
    return n_bytes(most(entered, padded * heads * a.d_v), dep.activation_dtype)


def handed_over_bytes(dep: Deployment, m: Linear, load: Load) -> Count:
    """Return the bytes of a linear layer's buffers whose states pcp ranks hand over."""
    transition = m.transition_elements // dep.tp * FP32_BYTES
    states = 2 * n_bytes(load.batch * (m.state_elements // dep.tp), m.state_dtype)
    n_kept = load.batch * (ceil_div(ceil_div(load.new_unpadded, dep.pcp), DELTA_CHUNK) + 1)
    n_kept = most(n_kept, ceil_div(load.rank_tokens, DELTA_CHUNK) + load.batch)
    return n_kept * transition + dep.pcp * (states + load.batch * transition)


def _projected_up(dep: Deployment, a: Attention, rows: Count) -> Count:
    """Keys and values of a rank's heads, of rows beside its own."""
    if a.kind != "mla":
        return 0 * rows
    return n_bytes(rows * (a.n_heads // dep.tp) * (a.d_qk + a.d_v), dep.activation_dtype)


def _segment_bytes(dep: Deployment, a: Attention, load: Load) -> Count:
    s, shards = segments(dep, load), dep.kv_shards
    some = 1 * (context_tokens(load) > 0)
    tokens = most(s.tokens * (s.rounds > 1), s.last_tokens)
    up = _projected_up(dep, a, load.batch * tokens)
    if shards == 1:
        return some * up
    rows = most(s.shard_rows * (s.rounds > 1), s.last_shard_rows)
    if is_padded(dep):
        # A shard's rows, a dcp group's, all shards', and these sorted by request.
        over_dcp = rows * dep.dcp * ((dep.dcp > 1) & (dep.pcp > 1))
        held = load.batch * (rows + over_dcp + 2 * rows * shards)
    else:
        workspace = workspace_tokens(dep, load.context, load.batch)
        held = workspace + ceil_div(workspace, dep.dcp) + load.batch * rows * shards
    return some * (n_bytes(held * a.kv_elements(dep.tp), dep.kv_dtype) + up)


def _exchanged_bytes(dep: Deployment, a: Attention, rows: Count) -> Count:
    """Gathered queries and partial outputs, of ``rows`` rows."""
    heads = a.n_heads // dep.tp
    gathered = heads * {"tp": dep.dcp, "pcp": 1, "all": dep.tp}[dep.dcp_group]
    latent = a.kind == "mla" and dep.phase == "decode"
    d_q, d_out = (a.kv_lora_rank + a.qk_rope_head_dim, a.kv_lora_rank) if latent else (a.d_qk, a.d_v)
    queries = n_bytes(rows * gathered * d_q, dep.activation_dtype)
    outputs = n_bytes(rows * gathered * d_out, dep.activation_dtype)
    if dep.decode_form == AG_RS or not is_padded(dep) and dep.prefill_form == ALLGATHER_Q:
        return queries + 2 * outputs + dep.dcp * rows * gathered * FP32_BYTES
    partial = outputs + rows * gathered * FP32_BYTES
    if a.span == "sparse" and is_padded(dep):  # outputs are sent from where they are
        return queries + 2 * partial
    if dep.decode_form in (None, A2A_FP32):
        partial = rows * gathered * (d_out + 1) * FP32_BYTES
    if dep.dcp_group != "tp":
        # Sent, received, and what is merged of a rank's heads gathered over pcp.
        return queries + outputs + 2 * partial + n_bytes(rows * heads * d_out, dep.activation_dtype)
    # Sent, received, and gathered over the ranks of other pcp coordinates.
    return queries + outputs + partial * (2 + (dep.sequence_ranks if dep.sequence_ranks > 1 else 0))
