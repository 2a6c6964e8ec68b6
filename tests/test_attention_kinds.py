"""Windows, chunks, sparse and linear attention: counted token by token, and audited."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_acceptance_tools import (
    DENSE,
    EXPERTS,
    GQA,
    MLA,
    deploy,
    hgx,
    one_row,
    play,
    small_model,
    sweep_rows,
    switch,
)
from test_audit import SOUND, simulated

from g5cp_vec import sweep
from g5cp_vec.config.model import Indexer, LayerTable, Linear
from g5cp_vec.config.topology import Ring
from g5cp_vec.cost.math_path import math_times
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.model_flops import model_flops
from g5cp_vec.cost.rows import cost_rows, parts_by_key
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.forms.halo import _representatives
from g5cp_vec.mapping.graph import REASON
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.spans import received_tokens, structure_reach
from g5cp_vec.mapping.structure import build_structure, structure_key

# --- The slow twin: every query, every key ----------------------------------------------------------------------------


def seen_keys(attention, query):
    """Keys a query sees, with twice their weight: itself by half; a full window's far end by half as well."""
    keys = dict.fromkeys(range(query), 2) | {query: 1}
    if attention.chunk is not None:
        return {key: n for key, n in keys.items() if key // attention.chunk == query // attention.chunk}
    limit = attention.window if attention.indexer is None else attention.indexer.top_k
    if limit is None:
        return keys
    # What is left of a window of w between its split ends: w - 1 whole keys and two halves.
    return {key: 1 if key == query - limit else n for key, n in keys.items() if key >= query - limit}


def needed_keys(attention, query):
    """Keys that have to be there: the window itself, without the half beyond its far end."""
    if attention.window is not None:
        return set(range(max(0, query - attention.window + 1), query + 1))
    return set(seen_keys(attention, query))


def owner_of(cp, new, cached, token):
    """Rank that computes a new token, in head-tail order; None for a cached one."""
    if token < cached:
        return None
    chunk = (token - cached) // (new // (2 * cp))
    return min(chunk, 2 * cp - 1 - chunk)


def twin(attention, cp, new, cached):
    """Doubled pairs of every rank with its own keys and with others, and tokens of every message, by brute force."""
    own, whole = [0] * cp, [0] * cp
    moved = {}
    for rank in range(cp):
        wanted = set()
        for query in range(cached, cached + new):
            if owner_of(cp, new, cached, query) != rank:
                continue
            wanted |= needed_keys(attention, query)
            for key, n in seen_keys(attention, query).items():
                whole[rank] += n
                own[rank] += n * (owner_of(cp, new, cached, key) == rank)
        of_cache = sum(key < cached for key in wanted)
        for src in range(cp):
            if src != rank:
                n = sum(owner_of(cp, new, cached, key) == src for key in wanted)
                moved[src, rank] = n + -(-of_cache // cp)
        if not any(owner_of(cp, new, cached, key) != rank for key in wanted):
            own[rank] = whole[rank]
    return own, whole, moved


def window(w, **more):
    return GQA.model_copy(update={"window": w, **more})


def chunked(c):
    return GQA.model_copy(update={"chunk": c})


def sparse(k, *, shared=False, **more):
    return MLA.model_copy(update={"indexer": Indexer(n_heads=4, head_dim=16, top_k=k, shared=shared, **more)})


DELTA = Linear(kind="gated_delta_net", n_heads=8, n_key_heads=4, key_head_dim=8, value_head_dim=6, conv_kernel=4)
LIGHTNING = Linear(kind="lightning", n_heads=8, n_key_heads=8, key_head_dim=8, value_head_dim=8)
MAMBA = Linear(
    kind="mamba2", n_heads=8, n_key_heads=2, key_head_dim=16, value_head_dim=4, conv_kernel=4, conv_bias=True
)


def structure_of(dep, seq_len, batch=1, cached=0):
    (reach,) = structure_reach(dep, build_load(dep, seq_len, batch, cached)).tolist()
    return build_structure(dep, reach=reach)


def local_attentions():
    return st.integers(1, 40).map(window) | st.integers(1, 40).map(chunked)


@settings(max_examples=150)
@given(local_attentions(), st.integers(2, 9), st.integers(1, 90), st.integers(0, 30), st.integers(1, 3))
def test_a_split_sequence_is_what_its_twin_counts(attention, cp, new, cached, batch):
    """FLOPs of own keys and of others', rank by rank, and tokens of every message."""
    dep = deploy(model=small_model(attention=attention, n_layers=1), cp=cp, kv_dtype="fp8")
    load = build_load(dep, new + cached, batch, cached)
    own, whole, moved = twin(attention, cp, load.new, load.cached)
    parts = parts_by_key(dep, load)
    for rank in range(cp):
        ((one,), (other,)) = parts[f"own@{rank}", 0], parts[f"halo@{rank}", 0]
        assert one.flops == batch * 8 * 32 * own[rank]
        assert one.flops + other.flops == batch * 8 * 32 * whole[rank]
    for rank in range(cp):
        arriving = sum(n for (_, dst), n in moved.items() if dst == rank)
        assert received_tokens(attention, load, cp, rank) == arriving
    structure = structure_of(dep, new + cached, batch, cached)
    (reach,) = structure_reach(dep, load).tolist()
    for rank, first in enumerate(_representatives(reach, cp, uniform=attention.window is not None)):
        for name in ("own", "halo"):
            assert parts[f"{name}@{rank}", 0] == parts[f"{name}@{first}", 0]
    by_id = {i: key for key, i in structure.keys.bytes.items()}
    sent = {}
    ops = structure.ops
    for op in np.flatnonzero(ops.op_reason == REASON["cp_halo"]):
        pair = int(ops.op_src[op]), int(ops.op_dst[op])
        assert pair not in sent
        sent[pair] = message_bytes(dep, load, dep.model.kinds[0], by_id[int(ops.graph.op_cost[op])])
    # 2 heads of 16, keys and values, a byte each.
    assert sent == {pair: batch * n * 64 for pair, n in moved.items() if n}


@settings(max_examples=100)
@given(local_attentions() | st.integers(1, 40).map(sparse) | st.just(GQA), st.integers(1, 60), st.integers(0, 40))
def test_an_unsplit_sequence_is_what_its_twin_counts(attention, new, cached):
    dep = deploy(model=small_model(attention=attention, n_layers=1))
    pairs = sum(sum(seen_keys(attention, query).values()) for query in range(cached, cached + new))
    width = 32 if attention.kind == "gqa" else 40 + 32  # absorbed: 32 + 8 and 32
    (core,) = [p for p in parts_by_key(dep, build_load(dep, new + cached, 2, cached))["attention", 0]
               if p.flop_class == "attention"]  # fmt: skip
    assert core.flops == 2 * 8 * width * pairs
    flops = model_flops(dep, build_load(dep, new + cached, 2, cached))
    without = model_flops(dep, build_load(dep, new + cached, 0, cached))
    assert set(without.values()) == {0}
    assert flops["bf16"] >= core.flops


def test_the_formula_of_a_window():
    """S * w - w^2 / 2 in place of S^2 / 2, for w < S; full attention for a window as long as the context."""
    for seq_len, w in ((100, 7), (100, 99), (4096, 1024)):
        dep = deploy(model=small_model(attention=window(w), n_layers=1))
        ((core,),) = [parts_by_key(dep, build_load(dep, seq_len, 1, 0))["attention", 0]]
        assert core.flops == 2 * 8 * 32 * (seq_len * w - w * w / 2)
    full = parts_by_key(deploy(model=DENSE), build_load(deploy(), 100, 1, 0))["attention", 0]
    for limit in (window(100), window(1000), chunked(100)):
        dep = deploy(model=small_model(attention=limit))
        assert parts_by_key(dep, build_load(dep, 100, 1, 0))["attention", 0] == full


@settings(max_examples=60)
@given(local_attentions() | st.integers(1, 40).map(sparse), st.integers(1, 200), st.integers(1, 6))
def test_a_decode_step_reads_what_it_sees(attention, context, cp):
    dep = deploy(model=small_model(attention=attention, n_layers=1), phase="decode", cp=cp)
    # The step's own token is the last of the context.
    seen = len(needed_keys(attention, context - 1))
    if attention.indexer is not None:
        seen = min(context, attention.indexer.top_k)
    share = -(-seen // cp)
    (core,) = [p for p in parts_by_key(dep, build_load(dep, context, 3, 0))["attention" if cp == 1 else "partial", 0]
               if p.flop_class == "attention"]  # fmt: skip
    width, elements = (32, 64) if attention.kind == "gqa" else (72, 40)
    assert core.flops == 3 * 2 * 8 * width * share
    choice = 4 * 3 * share if attention.indexer else 0
    assert core.bytes == 3 * share * elements * 2 + 3 * 8 * width * 2 + choice


# --- Audited ----------------------------------------------------------------------------------------------------------

MIXED = {
    "window": small_model(n_layers=3, layer=(LayerTable(attention=window(9), repeat=2), LayerTable(attention=GQA))),
    "two windows": small_model(layer=(LayerTable(attention=window(3)), LayerTable(attention=window(50)))),
    "chunks and experts": small_model(
        n_layers=4, moe=EXPERTS,
        layer=(LayerTable(attention=chunked(16), ffn="dense"), LayerTable(attention=chunked(16)),
               LayerTable(attention=GQA, ffn="dense"), LayerTable(attention=GQA)),
    ),
    "sparse": small_model(attention=sparse(12), n_layers=2, moe=EXPERTS, first_dense=1),
    "shared choice": small_model(
        n_layers=4, layer=(LayerTable(attention=sparse(12)), LayerTable(attention=sparse(12, shared=True)))
    ),
    "delta": small_model(
        n_layers=4, linear=DELTA, attention=GQA.model_copy(update={"output_gate": True, "rope_dim": 4}),
        moe=EXPERTS.model_copy(update={"shared_gate": True, "d_shared": 32}),
        layer=(LayerTable(mixer="linear", repeat=3), LayerTable()),
    ),
    "lightning": small_model(linear=LIGHTNING, layer=(LayerTable(mixer="linear"), LayerTable())),
    "mamba": small_model(
        n_layers=3, linear=MAMBA, gated=False,
        layer=(LayerTable(mixer="linear", ffn="none"), LayerTable(ffn="none"), LayerTable(mixer="none")),
    ),
    "no attention": small_model(n_layers=3, layer=(LayerTable(mixer="none", d_ff=64), LayerTable(), LayerTable())),
    "parallel": small_model(norms="parallel", attention=GQA.model_copy(update={"qk_norm": "width"})),
    "sandwich": small_model(norms="sandwich", ffn_bias=True, moe=EXPERTS, first_dense=1),
    "mla window": small_model(attention=MLA.model_copy(update={"window": 9})),
}  # fmt: skip


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(MIXED)),
    st.sampled_from(["prefill", "decode"]),
    st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 2, 1), (2, 2, 2), (1, 4, 2), (8, 1, 1)]),
    st.sampled_from([(1, 1), (2, 2), (2, 1)]),
    st.sampled_from(["ring", "direct"]),
    st.integers(1, 90),
    st.integers(0, 40),
    st.integers(1, 2),
    st.sampled_from(["switch", "hgx", "ring"]),
)
def test_nothing_is_lost(name, phase, degrees, dp_ep, collective, new, cached, batch, network):
    """All six KPIs are 0 for every kind of layer, in both phases, split or not."""
    cp, tp, pp = degrees
    topology = {"switch": switch(1e9, 1e-6), "hgx": hgx(2, 1, up=2e9, nic=1e9),
                "ring": Ring(name="r", link_bandwidth_bytes_per_s=1e9, latency_s=1e-6)}[network]  # fmt: skip
    dp, ep = dp_ep
    try:
        dep = deploy(
            model=MIXED[name], phase=phase, cp=cp, tp=tp, pp=pp, dp=dp, ep=ep, collective=collective,
            topology=topology, dtype="fp8",
        )  # fmt: skip
    except InfeasibleError:
        assume(False)
    cached = 0 if phase == "decode" else cached
    structure = structure_of(dep, new + cached, batch, cached)
    assert simulated(dep, new + cached, batch, cached, structure).audit() == SOUND


@pytest.mark.parametrize("name", ["window", "chunks and experts"])
def test_a_lost_message_is_found(name):
    """One send of a halo that never ends: the audit says how many bytes are gone, and that others went on."""
    dep = deploy(model=MIXED[name], cp=4, topology=switch(1e9, 1e-6))
    run = simulated(dep, 64, 1, 0, structure_of(dep, 64))
    lost = run.find("cp_halo")[0]
    kpis = run.doctor(finish={int(lost): np.nan}).audit()
    assert run.n_bytes(lost) > 0
    assert kpis.lost_ops == 1
    assert kpis.lost_bytes == run.n_bytes(lost)
    assert kpis.order_violations >= 1


HEAD = (
    'hidden = 64\nvocab = 1000\nn_layers = 4\nd_ff = 128\ndtype = "bf16"\n[attention]\nkind = "gqa"\nn_heads = 8\n'
    "n_kv_heads = 2\nhead_dim = 16\n"
)
WRITTEN = {
    "window": HEAD + "[[layer]]\nrepeat = 3\nattention = {window = 32}\n[[layer]]\n",
    "chunk": HEAD + "[[layer]]\nrepeat = 3\nattention = {chunk = 48}\n[[layer]]\n",
}


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_sweeps_are_audited_and_reduced_exactly(tmp_path, name):
    """Rows of one deployment fall into structures by reach; the reduced simulation equals the full one."""
    path = tmp_path / "m.toml"
    path.write_text(WRITTEN[name])
    fixed = {
        "phase": "prefill", "chip": "h200-sxm", "topology": "hgx-8", "n_chips": 16, "cp": 8, "tp": 2,
        "model": str(path),
    }  # fmt: skip
    lengths = [64, 100, 256, 1000, 4096]
    exact, full = (sweep_rows(fixed, fidelity, seq_len=lengths) for fidelity in ("exact", "full"))
    assert [row["step_s"] for row in exact] == pytest.approx([row["step_s"] for row in full], rel=1e-9)
    assert all(row["passkv_bytes"] > 0 for row in exact)
    assert [row["passkv_bytes"] for row in exact] == [row["passkv_bytes"] for row in full]
    grid = {"fixed": fixed, "axes": {"seq_len": lengths}}
    audited = sweep(grid, audit="all").to_dicts()
    for kpi in SOUND._fields:
        assert [row[kpi] for row in audited] == [0] * len(lengths)


@pytest.mark.parametrize("name", ["window", "two windows", "lightning", "no attention", "parallel", "mla window"])
def test_the_closed_form_without_cp_is_the_simulation(name):
    """Nothing overlaps in a dense model on a switch, whatever mixes its tokens."""
    for phase in ("prefill", "decode"):
        times = []
        for path in ("g5", "math"):
            dep = deploy(model=MIXED[name], phase=phase, tp=2, path=path, topology=switch(1e9, 1e-6))
            one = [np.array([n]) for n in (100, 2, 0)]
            load = build_load(dep, *one)
            if path == "math":
                times.append(math_times(dep, build_network(dep.topology, 2), load, 1).step_s[0])
            else:
                structure = build_structure(dep)
                rows = cost_rows(dep, structure.keys, structure.network, load, 1)
                times.append(play(structure.ops, one_row(rows))[1].max())
        assert times[0] == pytest.approx(times[1], rel=1e-12)


# --- Structure --------------------------------------------------------------------------------------------------------


def test_a_window_within_a_chunk_needs_its_neighbours_only():
    """cp 4, chunks of 16, window 9: 8 tokens of chunk i - 1 for the head, 8 of chunk 2 cp - 2 - i for the tail."""
    dep = deploy(model=small_model(attention=window(9), n_layers=1), cp=4)
    run = simulated(dep, 128, 1, 0, structure_of(dep, 128))
    ops = run.structure.ops
    pairs = {(int(ops.op_src[op]), int(ops.op_dst[op])): run.n_bytes(op) for op in run.find("cp_halo")}
    # Chunks 3 and 4 are both rank 3's; everyone else hears from both sides.
    assert pairs == dict.fromkeys([(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)], 8 * 64 * 2)


def test_far_from_the_ends_all_ranks_cost_the_same():
    """The symmetry that makes large groups cheap: all ranks but those near an end share their cost ids."""
    dep = deploy(model=small_model(attention=window(9), n_layers=1), cp=32)
    structure = structure_of(dep, 32 * 64)
    # Chunk 0 begins the sequence, chunk 1 could touch it; chunks 31 and 32 are one rank's. Ranks 2 to 30 are alike.
    assert {key[0] for key in structure.keys.durations if "@" in key[0]} == {
        f"{part}@{rank}" for part in ("own", "halo") for rank in (0, 1, 2, 31)
    }
    assert len(structure.keys.bytes) == 1


def test_rows_share_a_structure_while_their_reach_is_equal():
    dep = deploy(model=small_model(attention=window(100), n_layers=1), cp=4)
    network = build_structure(dep, reach=structure_reach(dep, build_load(dep, 4096, 1, 0))[0].tolist()).network
    lengths = np.arange(900, 1200)
    load = build_load(dep, lengths, np.ones_like(lengths), np.zeros_like(lengths))
    keys = [structure_key(dep, network, row) for row in structure_reach(dep, load).tolist()]
    # 99 tokens reach one chunk back as soon as a chunk has 99: 8 * 99 = 792; so all share one structure.
    assert len(set(keys)) == 1
    short = structure_reach(dep, build_load(dep, 400, 1, 0)).tolist()[0]
    assert structure_key(dep, network, short) != keys[0]
    # Without windows nothing of the load matters.
    assert structure_reach(deploy(cp=4), load).shape == (300, 0)


def test_a_ring_is_as_it_was():
    """Layers of full attention beside windows have the ring's ops, edge by edge."""
    alone = build_structure(deploy(model=small_model(n_layers=1), cp=4))
    beside = structure_of(deploy(model=small_model(
        layer=(LayerTable(attention=window(9)), LayerTable(attention=GQA))), cp=4), 128)  # fmt: skip
    ring, mixed = alone.blocks[1], beside.blocks[2]
    for field in ("kind", "src", "dst", "prio", "reason", "step", "pred", "succ", "route_links"):
        np.testing.assert_array_equal(getattr(ring, field), getattr(mixed, field))


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_caches_by_hand():
    """Window 9: at most 9 tokens; chunk 16: at most 16; delta net: 8 states of 8 * 6 in fp32 and 3 taps of 112."""
    token = 64 * 2
    for cp in (1, 4):
        for phase in ("prefill", "decode"):
            dep = deploy(model=small_model(attention=window(9)), cp=cp, phase=phase)
            assert MemoryModel(dep).at(1000, 3, 0).kv_bytes == 2 * 3 * -(-9 // cp) * token
            assert MemoryModel(dep).at(5, 3, 0).kv_bytes == 2 * 3 * -(-5 // cp) * token
            dep = deploy(model=small_model(attention=chunked(16)), cp=cp, phase=phase)
            assert MemoryModel(dep).at(1000, 3, 0).kv_bytes == 2 * 3 * (16 // cp) * token
    dep = deploy(model=small_model(linear=DELTA, layer=(LayerTable(mixer="linear"),)), tp=2)
    taps = 3 * (2 * 32 + 48) // 2 * 2
    assert MemoryModel(dep).at(1000, 3, 0).kv_bytes == 2 * 3 * (taps + 8 * 8 * 6 // 2 * 4)
    # Latents of 40 in bf16 are shared out; keys of 16 in fp8 with a scale are whole on the owner in decode.
    for phase, keys in (("prefill", 250), ("decode", 1000)):
        dep = deploy(model=small_model(attention=sparse(12)), cp=4, phase=phase)
        assert MemoryModel(dep).at(1000, 3, 0).kv_bytes == 2 * 3 * (250 * 40 * 2 + keys * 20)


def test_buffers_of_a_window_do_not_grow_with_the_context():
    dep = deploy(model=small_model(attention=window(9)), cp=4)
    assert MemoryModel(dep).at(10**6, 2, 0).buffer_bytes == 2 * 2 * 8 * 64 * 2
    full = deploy(model=MIXED["window"], cp=4)
    assert MemoryModel(full).at(10**6, 2, 0).buffer_bytes == 3 * 2 * 250_000 * 64 * 2


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(MIXED)),
    st.sampled_from(["prefill", "decode"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 400),
    st.integers(0, 20),
)
def test_max_seq_len_by_trying(name, phase, cp, batch, length, cached):
    try:
        dep = deploy(model=MIXED[name], phase=phase, cp=cp, ep=1)
    except InfeasibleError:
        assume(False)
    cached = 0 if phase == "decode" else cached
    room = MemoryModel(dep).at(cached + length, batch, cached).peak_bytes
    chip = dep.chip.model_copy(update={"hbm_bytes": int(room), "usable_memory_fraction": 1.0})
    dep = dataclasses.replace(dep, chip=chip)
    longest = MemoryModel(dep).max_seq_len(batch, cached)
    lengths = np.arange(cached + 1, cached + length + 300)
    held = MemoryModel(dep).at(lengths, np.full(len(lengths), batch), np.full(len(lengths), cached)).peak_bytes
    assert (np.diff(held) >= 0).all()
    fitting = lengths[held <= room]
    if len(fitting) < len(lengths):
        assert longest == fitting[-1]
    else:  # windows everywhere: nothing grows any more
        assert longest >= lengths[-1]


# --- Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": MIXED["mamba"], "tp": 4}, "tp = 4 does not divide 2 key heads of linear attention"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused_by_name(changes, message):
    with pytest.raises(InfeasibleError) as caught:
        deploy(**changes)
    assert message in str(caught.value)
