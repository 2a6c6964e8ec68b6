"""Linear attention: a state per head that every token updates and reads.

Counted as the recurrence states it, per token and head: one outer product into the state, one product with the query
(arXiv:2401.04658, arXiv:2405.21060), and, for the gated delta rule, one with the key (arXiv:2412.06464): 2 d_k d_v
FLOPs each. Kernels that work chunk by chunk do more arithmetic within a chunk, which is not counted. The state is
read and written once per sequence and step.

Under context parallelism (`g5cp_vec.mapping.forms.states`) a first pass sums up the chunks: the products into the
state, and for the delta rule the same two with the d_k x d_k matrix of the chunk's transition. Every rank combines the
2 cp gathered states in order: a product of two matrices for each but the last (delta rule), or element by element.
Under pcp (`g5cp_vec.mapping.forms.handed_over`) each rank has one piece: the first pass updates the state and finds the
transition (in fp32), every rank combines the pcp states but the first, and the ranks after the first update the state
once more before the product with the query.
"""

from __future__ import annotations

from g5cp_vec.config.attention import Linear
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import n_bytes
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.cost.parts import OpParts, Part
from g5cp_vec.cost.products import gemm, memory, touch
from g5cp_vec.mapping.load import Count, Load, wide

# Products of a d_k x d_v state with one vector, per token.
STATE_PRODUCTS = {"gated_delta_net": 3, "lightning": 2, "mamba2": 2}
# Of an element of a transition that is handed over.
TRANSITION_BYTES = 4


def linear_parts(dep: Deployment, load: Load, kind: LayerKind) -> OpParts:
    """Return the parts of the ops of a linear layer's mixer, but for norms of the hidden state."""
    m = kind.linear
    assert m is not None
    tp, tokens, hidden = dep.tp, load.rank_tokens, dep.model.hidden
    heads, key, value = m.n_heads // tp, m.key_width // tp, m.value_width // tp
    qkv = gemm(dep, "qkv", tokens, hidden, 2 * key + 2 * value + m.n_scalars * heads, dep.dtype)
    is_split = dep.cp > 1 and dep.phase == "prefill"
    # In decode those that the rank owns.
    sequences = load.rank_tokens if dep.phase == "decode" else load.batch
    convolution = []
    if m.conv_kernel:
        channels, n_taps = m.conv_width // tp, sequences * (m.conv_kernel - 1) * (1 + is_split)
        # Channels in and out, and the last taps before the sequence (before each chunk of it).
        convolution = [touch(dep, "qkv", 2 * tokens * channels + 2 * n_taps * channels)]
    moved = n_bytes(tokens * (2 * key + 2 * value), dep.activation_dtype)
    moved += 2 * n_bytes(sequences * m.state_elements // tp, m.state_dtype)
    core = Part("attention", "attention", linear_flops(m, tokens, heads), moved, dep.activation_dtype)
    # The output is normed and gated: output and gate in, product out.
    o_proj = [touch(dep, "o_proj", 3 * tokens * value), *gemm(dep, "o_proj", tokens, value, hidden, dep.o_proj_dtype)]
    if dep.pcp > 1 and dep.phase == "prefill":
        return {"qkv": qkv, "o_proj": o_proj, **_handed_over(dep, load, m, convolution, moved)}
    if not is_split:
        return {"qkv": qkv + convolution, "attention": [core], "o_proj": o_proj}
    return {"qkv": qkv, "o_proj": o_proj, "states": [*convolution, _summary(dep, load, m)],
            "scan": [*_combination(dep, load, m), core]}  # fmt: skip


def summary_bytes(dep: Deployment, m: Linear, batch: Count) -> Count:
    """Bytes of one chunk's state and transition, heads of one tp shard."""
    return n_bytes(batch * ((m.state_elements + m.transition_elements) // dep.tp), m.state_dtype)


def _summary(dep: Deployment, load: Load, m: Linear) -> Part:
    """Sum up a rank's two chunks: the states that they leave behind, and their transitions."""
    tokens, heads, d_k, d_v = load.rank_tokens, m.n_heads // dep.tp, m.key_head_dim, m.value_head_dim
    per_token = 4 * d_k * d_v + 4 * d_k * d_k if m.kind == "gated_delta_net" else 2 * d_k * d_v
    read = n_bytes(tokens * (m.key_width + m.value_width) // dep.tp, dep.activation_dtype)
    moved = read + 2 * summary_bytes(dep, m, load.batch)
    return Part("states", "attention", wide(tokens) * heads * per_token, moved, dep.activation_dtype)


def _combination(dep: Deployment, load: Load, m: Linear) -> list[Part]:
    """Find the states before a rank's chunks from those of all chunks: each read once, and two written."""
    moved = 2 * dep.cp * summary_bytes(dep, m, load.batch)
    moved += 2 * n_bytes(load.batch * (m.state_elements // dep.tp), m.state_dtype)
    if m.kind != "gated_delta_net":
        return [memory(dep, "combine", moved)]
    products = load.batch * (m.n_heads // dep.tp) * (2 * dep.cp - 1)
    flops = 2 * wide(products) * m.key_head_dim**2 * m.value_head_dim
    return [Part("combine", "attention", flops, moved, dep.activation_dtype)]


def _handed_over(dep: Deployment, load: Load, m: Linear, convolution: list[Part], moved: Count) -> OpParts:
    """Price a piece of a pcp rank: a pass for its state and transition, their combination, and the pass after it."""
    tokens, heads = load.rank_tokens, m.n_heads // dep.tp
    of_state, of_transition = heads * m.key_head_dim * m.value_head_dim, heads * m.key_head_dim**2
    states = n_bytes(load.batch * of_state, m.state_dtype)
    transitions = load.batch * of_transition * TRANSITION_BYTES
    read = n_bytes(tokens * (m.key_width + m.value_width) // dep.tp, dep.activation_dtype)
    # Two products of the state with a token, two of the transition.
    flops = 4 * wide(tokens) * (of_state + of_transition)
    first = Part("states", "attention", flops, read + states + transitions, dep.activation_dtype)
    combined = 2 * wide(load.batch) * (dep.pcp - 1) * of_state * m.key_head_dim
    handed = dep.pcp * (2 * states + transitions)
    combination = Part("combine", "attention", combined, handed, dep.activation_dtype)
    scans = [
        Part("attention", "attention", 2 * n_products * wide(tokens) * of_state, moved, dep.activation_dtype)
        for n_products in (1, STATE_PRODUCTS[m.kind])
    ]
    return {
        "states": [*convolution, first],
        "scan@0": [combination, scans[0]],
        "scan@1": [combination, scans[1]],
    }


def linear_flops(m: Linear, tokens: Count, heads: int) -> Count:
    """FLOPs of the recurrence of so many heads over so many tokens."""
    return 2 * STATE_PRODUCTS[m.kind] * wide(tokens) * heads * m.key_head_dim * m.value_head_dim
