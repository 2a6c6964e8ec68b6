"""Models with linear attention under pcp and dcp: contiguous pieces, states handed over, layouts changed and back.

Figures from vllm-ascend v0.23 (pull request 7422), written out here once more: a gathering of queries, keys and values
and one of outputs around attention; of last taps, states and transitions in a linear layer.
"""

from __future__ import annotations

import numpy as np
import pytest
from checks import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from test_acceptance_tools import EXPERTS, MLA, small_model
from test_dcp_bytes import WIDE, deploy
from test_dcp_forms import ALGORITHMS, TOPOLOGIES, assert_sound, build, order
from test_reduction import assert_reduced_equals_full

from g5cp_vec.config.context import legal_layouts, mixers_of
from g5cp_vec.config.model import LayerTable, Linear
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.rows import cost_rows, parts_by_key
from g5cp_vec.engine.arrays import FLOW
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel

DELTA = Linear(kind="gated_delta_net", n_heads=16, n_key_heads=8, key_head_dim=8, value_head_dim=12, conv_kernel=4)
LAYERS = (LayerTable(mixer="linear"), LayerTable())
# 16 query heads and 2 key/value heads of 24 elements beside a delta rule.
HYBRID = small_model(name="hybrid", attention=WIDE, linear=DELTA, layer=LAYERS, n_layers=2)
WITH_EXPERTS = small_model(
    name="experts", attention=WIDE, linear=DELTA, layer=LAYERS, n_layers=2, moe=EXPERTS, first_dense=0
)


def ceil(a, b):
    return -(-a // b)


def sent(dep, seq_len, batch=1, cached=0):
    """Contributed bytes and wire bytes of a rank, of pcp and dcp messages of each layer kind."""
    load, structure = build_load(dep, seq_len, batch, cached), build(dep, seq_len, batch, cached)
    ops, graph = structure.ops, structure.ops.graph
    found = {}
    for key, number in structure.keys.bytes.items():
        if isinstance(key, tuple) and key[0][:3] in ("pcp", "dcp"):
            size = int(message_bytes(dep, load, dep.model.kinds[0], key))
            flows = (graph.op_kind == FLOW) & (graph.op_cost == number)
            found[key] = (size, int(np.bincount(ops.op_src[flows], minlength=dep.n_chips).max()) * size)
    return found


# --- Bytes ------------------------------------------------------------------------------------------------------------


def test_thirteen_tokens_on_two_ranks():
    """Pieces of 7 and 6 tokens; 16 padded ones in attention, 8 on each rank; tp 2: 8 heads, one key/value head."""
    found = sent(deploy(model=HYBRID, tp=2, pcp=2), 13)
    assert found == {
        ("pcp_taps", 0): (3 * (2 * 4 * 8 + 8 * 12) * 2, 3 * 160 * 2),
        ("pcp_states", 0): (8 * 8 * 12 * 4, 8 * 8 * 12 * 4),
        ("pcp_transitions", 0): (8 * 8 * 8 * 4, 8 * 8 * 8 * 4),
        ("pcp_qkv", 1): (7 * (8 + 2) * 24 * 2, 7 * 240 * 2),
        ("pcp_exit", 1): (8 * 8 * 24 * 2, 8 * 8 * 24 * 2),
    }


@pytest.mark.parametrize("collective", ["ring", "direct"])
@pytest.mark.parametrize("form", ["allgather_kv", "allgather_q"])
@pytest.mark.parametrize(("tp", "pcp", "dcp"), [(1, 2, 1), (2, 3, 1), (8, 2, 2), (8, 2, 4), (4, 4, 2)])
def test_every_collective_of_a_prefill(tp, pcp, dcp, form, collective):
    dep = deploy(
        model=HYBRID, tp=tp, pcp=pcp, dcp=dcp, prefill_form=form, block_size=16, collective=collective,
        kv_dtype="fp8",
    )  # fmt: skip
    h, g, d = 16 // tp, max(1, 2 // tp), 24
    for seq_len, batch, cached in [(1, 1, 0), (13, 1, 0), (96, 2, 0), (1000, 3, 0), (1000, 1, 1), (4099, 2, 4000)]:
        new = seq_len - cached
        piece, chunk = ceil(new, pcp), ceil(new, 2 * pcp)
        wanted = {
            ("pcp_taps", 0): batch * 3 * (2 * (8 // tp) * 8 + h * 12) * 2,
            ("pcp_states", 0): batch * h * 8 * 12 * 4,
            ("pcp_transitions", 0): batch * h * 8 * 8 * 4,
            ("pcp_qkv", 1): batch * piece * (h + 2 * g) * d * 2,
            ("pcp_exit", 1): batch * 2 * chunk * h * d * 2,
        }
        found = sent(dep, seq_len, batch, cached)
        for key, size in wanted.items():
            assert found.pop(key) == (size, (pcp - 1) * size), key
        if cached and form == "allgather_q":
            rows = batch * 2 * pcp * chunk
            assert found.pop(("pcp_q", 1)) == (rows // pcp * h * d * 2, (pcp - 1) * (rows // pcp) * h * d * 2)
            assert found.pop(("pcp_partial", 1))[0] == rows * h * dcp * (d + 1) * 4
            if dcp > 1:
                assert found.pop(("dcp_q", 1))[0] == rows * h * d * 2
                assert found.pop(("dcp_a2a", 1))[0] == rows * h * (d + 1) * 4
        elif cached:
            assert {key[0].split("@")[0] for key in found} == {"pcp_segment"} | ({"dcp_segment"} if dcp > 1 else set())
            found = {}
        assert found == {}


def test_a_decode_step_hands_nothing_over():
    """States are on every rank: only attention, as without linear layers."""
    for layout in ({"pcp": 2, "dcp": 2}, {"dcp": 4}, {"dcp": 4, "cp_semantics": "orthogonal"}):
        mixed = sent(deploy(model=HYBRID, tp=8, phase="decode", **layout), 1000, 2)
        alone = sent(deploy(model=small_model(attention=WIDE, n_layers=1), tp=8, phase="decode", **layout), 1000, 2)
        assert {name: of for (name, _), of in mixed.items()} == {name: of for (name, _), of in alone.items()}


def test_dcp_leaves_linear_layers_alone():
    for semantics in ("multiplicative", "orthogonal"):
        for seq_len, cached in ((1000, 0), (1000, 900)):
            found = sent(deploy(model=HYBRID, tp=8, dcp=4, cp_semantics=semantics), seq_len, 1, cached)
            assert {kind for _, kind in found} <= {1}
            assert bool(found) == (cached > 0)


# --- Work and memory --------------------------------------------------------------------------------------------------


def test_the_first_rank_goes_through_once():
    """Per token and head of 8 x 12: two products for the state, two of 8 x 8 for the transition, one for outputs."""
    parts = parts_by_key(deploy(model=HYBRID, tp=2, pcp=3), build_load(deploy(model=HYBRID, tp=2, pcp=3), 100, 2, 0))
    tokens, state = 2 * 34, 8 * 8 * 12
    assert parts["states", 0][-1].flops == tokens * (4 * state + 4 * 8 * 8 * 8)
    first, later = parts["scan@0", 0], parts["scan@1", 0]
    assert first[1].flops == tokens * 2 * state
    assert later[1].flops == 3 * first[1].flops
    # Two products of an 8 x 8 and an 8 x 12 matrix for each head and sequence.
    assert first[0].flops == later[0].flops == 2 * 2 * 8 * 2 * 8 * 8 * 12


def test_pieces_decide_what_projections_see():
    dep = deploy(model=HYBRID, tp=2, pcp=4)
    for seq_len in (1, 7, 8, 9, 1001):
        load = build_load(dep, seq_len, 3, 0)
        assert load.rank_tokens == 3 * ceil(seq_len, 4)
        assert load.new == 8 * ceil(seq_len, 8)


def test_caches_of_attention_are_shared_and_states_are_not():
    def kept(**layout):
        return MemoryModel(deploy(model=HYBRID, tp=8, phase="decode", block_size=16, **layout)).at(1024, 2, 0).kv_bytes

    state = 2 * (2 * 8 * 12 * 4 + 3 * (2 * 8 + 2 * 12) * 2)
    cache = 2 * 1024 * 2 * 24 * 2
    assert kept() == state + cache
    for layout, shards in (({"dcp": 4}, 4), ({"pcp": 2}, 2), ({"pcp": 2, "dcp": 4}, 8)):
        assert kept(**layout) == state + cache // shards


def test_buffers():
    """Tp 2, pcp 2, 1000 tokens: queries, keys and values twice; or transitions after 64 tokens each, and states."""
    memory = MemoryModel(deploy(model=HYBRID, tp=2, pcp=2)).at(1000, 1, 0)
    entered = (1000 + 1000) * (8 + 2) * 24 * 2
    transition, state = 8 * 8 * 8 * 4, 8 * 8 * 12 * 4
    handed = (ceil(500, 64) + 1) * transition + 2 * (2 * state + transition)
    assert memory.buffer_bytes == max(entered, handed) == entered
    small = MemoryModel(deploy(model=HYBRID, tp=2, pcp=2)).at(2, 1, 0)
    assert small.buffer_bytes == 2 * transition + 2 * (2 * state + transition)


# --- Programs, audits, reductions -------------------------------------------------------------------------------------


def test_programs():
    def middle(chip=0, layer=0, phase="prefill", cached=0, **layout):
        structure = build(deploy(model=HYBRID, phase=phase, **layout), 96 + cached, 1, cached)
        if layer == 0:
            return order(structure, chip)[1:-2]
        structure.ops.op_layer[structure.ops.op_layer == 0] = 9
        structure.ops.op_layer[structure.ops.op_layer == 1] = 0
        return order(structure, chip)[1:-2]

    both = {"tp": 4, "pcp": 2, "dcp": 2}
    assert middle(**both) == ["states", "scan@0"]
    assert middle(**both, chip=4) == ["states", "scan@1"]
    assert middle(**both, phase="decode", chip=4) == ["attention"]
    assert middle(tp=4, dcp=2) == ["attention"]
    assert middle(**both, layer=1) == ["restore", "attend@0", "exit"]
    queries = {**both, "prefill_form": "allgather_q", "cached": 64, "layer": 1}
    assert middle(**queries, chip=4) == ["restore", "head@1", "context@3", "tail@1", "merge_context", "exit"]


@settings(max_examples=60)
@given(st.data())
def test_audits_are_sound(data):
    semantics = data.draw(st.sampled_from(["multiplicative", "orthogonal"]))
    tp, pcp, dcp = data.draw(st.sampled_from([(4, 1, 2), (8, 1, 4), (8, 2, 2), (8, 2, 4), (2, 3, 1), (1, 2, 1)]))
    if semantics == "orthogonal" and pcp > 1:
        return
    phase, form = data.draw(
        st.sampled_from([("prefill", "allgather_kv"), ("prefill", "allgather_q"), ("decode", None)])
    )
    model, ep = HYBRID, 1
    if 16 % (pcp * tp) == 0 and data.draw(st.booleans()):
        model, ep = WITH_EXPERTS, data.draw(st.sampled_from([1, pcp * tp]))
    dep = deploy(
        model=model, phase=phase, tp=tp, pcp=pcp, dcp=dcp, cp_semantics=semantics, ep=ep, block_size=16,
        collective=data.draw(st.sampled_from(ALGORITHMS)), interleave=data.draw(st.sampled_from([1, 8])),
        topology=TOPOLOGIES[data.draw(st.sampled_from(sorted(TOPOLOGIES)))], prefill_form=form,
    )  # fmt: skip
    new, cached = data.draw(st.integers(1, 999)), data.draw(st.sampled_from([0, 1, 333, 4096]))
    batch, cached = data.draw(st.integers(1, 3)), cached if phase == "prefill" else 0
    assert_sound(dep, new, batch, cached)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_reduced_equals_full(phase):
    for topology in TOPOLOGIES.values():
        dep = deploy(model=WITH_EXPERTS, tp=4, pcp=2, dcp=2, ep=8, phase=phase, topology=topology)
        structure = build(dep, 1000, 2)
        costs = cost_rows(
            dep, structure.keys, structure.network, build_load(dep, *(np.array([n]) for n in (1000, 2, 0))), 1
        )
        assert_reduced_equals_full(structure, costs)


# --- What is legal ----------------------------------------------------------------------------------------------------

LIGHTNING = Linear(kind="lightning", n_heads=16, n_key_heads=16, key_head_dim=8, value_head_dim=8)
REFUSED = {
    "orthogonal": ({"pcp": 2, "cp_semantics": "orthogonal"}, "linear attention with pcp = 2 is not deployed with orth"),
    "lightning": (
        {"pcp": 2, "model": small_model(attention=WIDE, linear=LIGHTNING, layer=LAYERS)},
        "linear attention (lightning) with pcp = 2 is not deployed",
    ),
    "latents": (
        {"pcp": 2, "model": small_model(attention=MLA, linear=DELTA.model_copy(), layer=LAYERS)},
        "linear attention (gated_delta_net beside latent attention) with pcp = 2 is not deployed",
    ),
    "rings": ({"pcp": 2, "prefill_form": "pass_kv"}, "of a model with linear attention over pcp is not deployed"),
    "copies": ({"dcp": 2, "tp": 2}, "dcp = 2 needs more tp ranks than 2 key/value heads, got tp = 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    changes, message = REFUSED[case]
    with refused(message):
        deploy(**{"model": HYBRID, "tp": 4} | changes)


def test_legal_layouts_count_linear_heads():
    """8 key heads of the delta rule: no tp of 16; no pcp with orthogonal semantics, or with a lightning layer."""
    found = legal_layouts(mixers_of(HYBRID), 16, "multiplicative")
    assert {tp for tp, _, _ in found} == {1, 2, 4, 8}
    assert (8, 2, 4) in found
    assert {pcp for _, pcp, _ in legal_layouts(mixers_of(HYBRID), 16, "orthogonal")} == {1}
    other = small_model(attention=WIDE, linear=LIGHTNING, layer=LAYERS)
    assert {pcp for _, pcp, _ in legal_layouts(mixers_of(other), 16, "multiplicative")} == {1}
    assert any(dcp > 1 for _, _, dcp in legal_layouts(mixers_of(other), 16, "multiplicative"))
