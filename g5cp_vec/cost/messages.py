"""Exact bytes of every message, by the key that flows carry.

Sources: pass-KV and pass-Q messages from the equations of the G5 CP specification (ring step: S / cp tokens of
c_kv bytes; query b * d * s, reduction b * (d + 2 n_h) * s); collectives move 1 / size of the buffer per step. The query
of sparse attention brings the choice of tokens along, as 32-bit numbers.
"""

from __future__ import annotations

from g5cp_vec.config.attention import Attention, Linear
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.cost.attention import absorbed_dims
from g5cp_vec.cost.linear import TRANSITION_BYTES, summary_bytes
from g5cp_vec.cost.sharded import SHARDED_MESSAGES, sharded_message
from g5cp_vec.cost.sharded_sparse import SPARSE_MESSAGES, sparse_message
from g5cp_vec.cost.sparse import CHOICE_BYTES
from g5cp_vec.mapping.graph import MessageKey
from g5cp_vec.mapping.load import Count, Load, ceil_div, expert_rows
from g5cp_vec.mapping.spans import sent_tokens


def message_bytes(dep: Deployment, load: Load, kinds: list[LayerKind], key: MessageKey) -> Count:
    """Return the bytes of one message.

    Parameters
    ----------
    dep : Deployment
    load : Load
    kinds : list of LayerKind
        Layer kinds by index.
    key : str or (str, int)
        Key of a flow, with the index of the layer kind where the message depends on it.
    """
    hidden, dtype = dep.model.hidden, dep.activation_dtype
    if key == "tp_chunk":
        return ceil_div(n_bytes(load.rank_tokens * hidden, dtype), dep.tp)
    if key in ("pp", "pcp_hidden", "moe_hidden", "moe_sums"):
        return n_bytes(load.rank_tokens * hidden, dtype)
    if key in ("ep_dispatch", "ep_combine"):
        return n_bytes(expert_rows(dep, load)[0] * hidden, dtype)
    if key == "ep_gather":
        return n_bytes(expert_rows(dep, load)[1] * hidden, dtype)
    assert isinstance(key, tuple)
    name, index = key
    if name == "moe_logits":
        moe = kinds[index].moe
        assert moe is not None
        return n_bytes(load.rank_tokens * moe.n_experts, dtype)
    if name.startswith("tp_"):
        return _multi_node_chunk(dep, load, name, members=index)
    return _attention_message(dep, load, kinds[index], name)


def _multi_node_chunk(dep: Deployment, load: Load, name: str, members: int) -> Count:
    """Bytes of a step of an all-reduce over nodes with ``members`` chips each, inside a node or across nodes."""
    total = n_bytes(load.rank_tokens * dep.model.hidden, dep.activation_dtype)
    if name.startswith("tp_rails"):
        of_ring = ceil_div(total, dep.tp * members)
        return of_ring if name.endswith("across") else (members - 1) * of_ring
    owned = ceil_div(total, members)
    return ceil_div(owned, dep.tp // members) if name.endswith("across") else owned


def _attention_message(dep: Deployment, load: Load, kind: LayerKind, name: str) -> Count:
    if kind.linear is not None:
        return _linear_message(dep, load, kind.linear, name)
    a = kind.softmax
    assert a is not None
    heads = a.n_heads // dep.tp
    name, _, pair = name.partition("@")
    if name in SHARDED_MESSAGES:
        return sharded_message(dep, load, kind, name, pair)
    if name in SPARSE_MESSAGES:
        return sparse_message(dep, load, kind, name)
    if name in ("cp_pass_kv", "cp_latents"):
        block = load.batch * (load.context // dep.sequence_ranks)
        return n_bytes(block * a.kv_elements(dep.tp), dep.kv_dtype)
    if name == "cp_keys":
        assert a.scores is not None
        return load.batch * (load.context // dep.cp) * a.scores.key_bytes
    if name == "cp_halo":
        src, dst = map(int, pair.split(">"))
        tokens = load.batch * sent_tokens(a, load, dep.cp, src, dst)
        return n_bytes(tokens * a.kv_elements(dep.tp), dep.kv_dtype)
    d_q, d_out = absorbed_dims(kind)
    if name == "cp_pass_q":
        return n_bytes(load.batch * heads * d_q, dep.activation_dtype) + _choice_bytes(a, load.batch)
    if name == "cp_pass_q_ring":
        return n_bytes(load.rank_tokens * heads * d_q, dep.activation_dtype) + _choice_bytes(a, load.rank_tokens)
    if name == "cp_reduce_ring":
        # An output, and its log-sum-exp in fp32.
        return n_bytes(load.rank_tokens * heads * d_out, dep.activation_dtype) + 4 * load.rank_tokens * heads
    assert name == "cp_reduce"
    return n_bytes(load.batch * heads * (d_out + 2), dep.activation_dtype)


def _choice_bytes(a: Attention, sequences: Count) -> Count:
    """Bytes of what a layer has chosen itself for so many sequences; another layer's choice has been sent before."""
    return sequences * a.scores.top_k * CHOICE_BYTES if a.scores is not None else 0


def _linear_message(dep: Deployment, load: Load, m: Linear, name: str) -> Count:
    if name == "pcp_states":
        return n_bytes(load.batch * (m.state_elements // dep.tp), m.state_dtype)
    if name == "pcp_transitions":
        return load.batch * (m.transition_elements // dep.tp) * TRANSITION_BYTES
    if name == "cp_states":
        return 2 * summary_bytes(dep, m, load.batch)
    assert name in ("cp_taps", "pcp_taps")
    return n_bytes(load.batch * (m.conv_kernel - 1) * (m.conv_width // dep.tp), dep.activation_dtype)
