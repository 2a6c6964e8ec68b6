"""Linear attention: a state per head that every token updates and reads.

Counted as the recurrence states it, per token and head: one outer product into the state, one product with the query
(arXiv:2401.04658, arXiv:2405.21060), and, for the gated delta rule, one with the key (arXiv:2412.06464): 2 d_k d_v
FLOPs each. Kernels that work chunk by chunk do more arithmetic within a chunk, which is not counted. The state is
read and written once per sequence and step.
"""

from __future__ import annotations

from g5cp_vec.config.attention import Linear
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.cost.parts import OpParts, Part
from g5cp_vec.cost.products import gemm, touch
from g5cp_vec.mapping.load import Count, Load, wide

# Products of a d_k x d_v state with one vector, per token.
STATE_PRODUCTS = {"gated_delta_net": 3, "lightning": 2, "mamba2": 2}


def linear_parts(dep: Deployment, load: Load, kind: LayerKind) -> OpParts:
    """Return the parts of the ops of a linear layer's mixer, all at cp = 1."""
    m = kind.linear
    assert m is not None
    tp, tokens, hidden = dep.tp, load.rank_tokens, dep.model.hidden
    heads, key, value = m.n_heads // tp, m.key_width // tp, m.value_width // tp
    qkv = [gemm(dep, "qkv", tokens, hidden, 2 * key + 2 * value + m.n_scalars * heads, dep.dtype)]
    if m.conv_kernel:
        channels = m.conv_width // tp
        # Channels in and out, and the last taps of the sequence before.
        qkv.append(touch(dep, "qkv", 2 * tokens * channels + 2 * load.batch * (m.conv_kernel - 1) * channels))
    moved = n_bytes(tokens * (2 * key + 2 * value), dep.activation_dtype)
    moved += 2 * n_bytes(load.batch * m.state_elements // tp, m.state_dtype)
    core = Part("attention", "attention", linear_flops(m, tokens, heads), moved, dep.activation_dtype)
    # The output is normed and gated: output and gate in, product out.
    o_proj = [touch(dep, "o_proj", 3 * tokens * value), gemm(dep, "o_proj", tokens, value, hidden, dep.dtype)]
    return {"qkv": qkv, "attention": [core], "o_proj": o_proj}


def linear_flops(m: Linear, tokens: Count, heads: int) -> Count:
    """FLOPs of the recurrence of so many heads over so many tokens."""
    return 2 * STATE_PRODUCTS[m.kind] * wide(tokens) * heads * m.key_head_dim * m.value_head_dim
