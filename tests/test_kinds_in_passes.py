"""Windows, chunks, sparse and linear attention where a prefill comes in passes, or where queries go round a ring."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_acceptance_tools import GQA, MLA, deploy, hgx, small_model, switch
from test_attention_kinds import HEAD, MIXED, chunked, needed_keys, owner_of, sparse, structure_of, twin, window
from test_audit import SOUND, simulated

import g5cp_vec
from g5cp_vec.config.topology import Ring
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.rows import parts_by_key
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel
from g5cp_vec.runner.schema import KPIS

LATENT = HEAD.replace('kind = "gqa"', 'kind = "mla"').replace("n_kv_heads = 2\nhead_dim = 16\n", "") + (
    "q_lora_rank = 24\nkv_lora_rank = 32\nqk_nope_head_dim = 16\nqk_rope_head_dim = 8\nv_head_dim = 12\n"
)
WRITTEN = {
    "window": HEAD + "[[layer]]\nrepeat = 3\nattention = {window = 100}\n[[layer]]\n",
    "chunk": HEAD + "[[layer]]\nrepeat = 3\nattention = {chunk = 300}\n[[layer]]\n",
    "sparse": LATENT + "[attention.indexer]\nn_heads = 4\nhead_dim = 16\ntop_k = 200\n",
    "linear": HEAD
    + "[linear]\nkind = 'gated_delta_net'\nn_heads = 8\nn_key_heads = 4\nkey_head_dim = 8\nvalue_head_dim = 6\n"
    "conv_kernel = 4\n[[layer]]\nmixer = 'linear'\nrepeat = 3\n[[layer]]\nattention = {window = 100}\n",
}
SUMMED = (
    "step_s", "compute_s", "attention_s", "overhead_s", "comm_s", "exposed_comm_s", "tp_bytes", "n_ops", "n_events",
)  # fmt: skip


@pytest.fixture
def point(tmp_path):
    """Run a point of a written model; all six KPIs are 0."""

    def run(name, **keys):
        path = tmp_path / f"{name}.toml"
        path.write_text(WRITTEN[name])
        fixed = {"phase": "prefill", "chip": "h200-sxm", "topology": "hgx-8", "tp": 2, "model": str(path), **keys}
        result = g5cp_vec.run({"fixed": {"n_chips": fixed["tp"] * fixed["cp"], **fixed}})
        assert [getattr(result, kpi) for kpi in KPIS] == [0] * 6
        return result

    return run


# --- Chunked prefill --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(WRITTEN))
@pytest.mark.parametrize(
    ("cp", "seq_len", "cached", "chunk"),
    [(2, 1000, 0, 300), (4, 1000, 77, 256), (3, 640, 639, 100), (8, 2048, 0, 512)],
)
def test_a_chunked_prefill_is_the_sum_of_its_passes(point, name, cp, seq_len, cached, chunk):
    whole = point(name, cp=cp, seq_len=seq_len, cached_tokens=cached, chunk_tokens=chunk, batch=2)
    begins = range(cached, seq_len, chunk)
    passes = [point(name, cp=cp, seq_len=min(begin + chunk, seq_len), cached_tokens=begin, batch=2) for begin in begins]
    for column in SUMMED:
        assert getattr(whole, column) == pytest.approx(sum(getattr(p, column) for p in passes), rel=1e-12), column
    assert max(p.passkv_bytes for p in passes) <= whole.passkv_bytes <= sum(p.passkv_bytes for p in passes)
    assert whole.peak_bytes == max(p.peak_bytes for p in passes)
    assert whole.breakdown().step_s == pytest.approx(whole.step_s, rel=1e-12)
    once = point(name, cp=cp, seq_len=seq_len, cached_tokens=cached, batch=2)
    assert whole.mfu * whole.ttft_s == pytest.approx(once.mfu * once.ttft_s, rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([window(100), window(7), chunked(96), chunked(300)]),
    st.integers(2, 5),
    st.integers(1, 260),
    st.integers(0, 60),
    st.integers(20, 120),
)
def test_bytes_of_all_passes_are_those_of_the_twin(tmp_path_factory, attention, cp, new, cached, chunk):
    """Token by token over every pass: what each rank sends of what the queries of others see; the most of any rank."""
    limit = {name: getattr(attention, name) for name in ("window", "chunk") if getattr(attention, name)}
    ((name, n),) = limit.items()
    path = tmp_path_factory.mktemp("m") / "m.toml"
    path.write_text(HEAD + f"{name} = {n}\n")
    fixed = {
        "phase": "prefill", "chip": "h200-sxm", "topology": "flat-450", "model": str(path), "n_chips": cp, "cp": cp,
        "seq_len": new + cached, "cached_tokens": cached, "chunk_tokens": chunk,
    }  # fmt: skip
    result = g5cp_vec.run({"fixed": fixed})
    sent = [0] * cp
    for begin in range(cached, cached + new, chunk):
        length = min(chunk, cached + new - begin)
        padded, before = -(-length // (2 * cp)) * 2 * cp, -(-begin // cp) * cp
        for (src, _), tokens in twin(attention, cp, padded, before)[2].items():
            sent[src] += tokens
    # 2 heads of 16, keys and values, two bytes each, 4 layers.
    assert result.passkv_bytes == max(sent) * 64 * 2 * 4
    assert [getattr(result, kpi) for kpi in KPIS] == [0] * 6


def test_passes_of_different_structure_go_together(point, tmp_path):
    """Rows of one and of several passes in one sweep, each as if alone."""
    alone = point("window", cp=4, seq_len=900, chunk_tokens=256)
    fixed = {
        "phase": "prefill", "chip": "h200-sxm", "topology": "hgx-8", "tp": 2, "model": str(tmp_path / "window.toml"),
        "n_chips": 8, "cp": 4,
    }  # fmt: skip
    axes = {"chunk_tokens": [0, 256, 4096], "seq_len": [500, 900]}
    for jobs in (1, 2):
        frame = g5cp_vec.sweep({"name": "t", "fixed": fixed, "axes": axes}, audit="all", jobs=jobs)
        assert [frame[kpi].to_list() for kpi in KPIS] == [[0] * 6] * 6
        rows = {(r["chunk_tokens"], r["seq_len"]): r for r in frame.to_dicts()}
        assert rows[256, 900]["step_s"] == alone.step_s
        assert rows[0, 900]["step_s"] == rows[4096, 900]["step_s"] < alone.step_s


# --- Windows of latents -----------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    st.integers(1, 40).map(lambda n: MLA.model_copy(update={"window": n}))
    | st.integers(1, 40).map(lambda n: MLA.model_copy(update={"chunk": n})),
    st.integers(2, 6),
    st.integers(1, 90),
    st.integers(0, 30),
)
def test_latents_of_a_halo_are_projected_up_where_they_are_attended(attention, cp, new, cached):
    """Token by token: latents travel, and a rank projects up its own tokens and what arrives, and attends both."""
    dep = deploy(model=small_model(attention=attention, n_layers=1), cp=cp)
    load = build_load(dep, new + cached, 2, cached)
    own, whole, moved = twin(attention, cp, load.new, load.cached)
    parts = parts_by_key(dep, load)
    for rank in range(cp):
        n_own = load.new // cp
        shares = [n for (_, dst), n in moved.items() if dst == rank]
        of_cache = -(-len({
            key for query in range(load.cached, load.cached + load.new)
            if owner_of(cp, load.new, load.cached, query) == rank
            for key in needed_keys(attention, query) if key < load.cached
        }) // cp)  # fmt: skip
        up, core = parts[f"own@{rank}", 0]
        assert up.flops == 2 * 2 * n_own * 32 * 8 * (16 + 12)
        assert core.flops == 2 * 8 * (24 + 12) * own[rank]
        up, core = parts[f"halo@{rank}", 0]
        assert up.flops == 2 * 2 * (sum(shares) + of_cache) * 32 * 8 * (16 + 12)
        assert core.flops == 2 * 8 * (24 + 12) * (whole[rank] - own[rank])
        for src in range(cp):
            if src != rank:
                sent = message_bytes(dep, load, dep.model.kinds[0], (f"cp_halo@{src}>{rank}", 0))
                assert sent == 2 * moved[src, rank] * (32 + 8) * 2


# --- Queries round a ring ---------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(MIXED)),
    st.sampled_from([(2, 1, 1), (3, 1, 1), (4, 2, 1), (2, 2, 2), (5, 2, 2)]),
    st.sampled_from([(1, 1), (2, 2), (2, 1)]),
    st.integers(1, 90),
    st.integers(1, 7),
    st.sampled_from(["switch", "hgx", "ring"]),
)
def test_nothing_is_lost(name, degrees, dp_ep, context, batch, network):
    (cp, tp, pp), (dp, ep) = degrees, dp_ep
    topology = {"switch": switch(1e9, 1e-6), "hgx": hgx(2, 1, up=2e9, nic=1e9),
                "ring": Ring(name="r", link_bandwidth_bytes_per_s=1e9, latency_s=1e-6)}[network]  # fmt: skip
    try:
        dep = deploy(
            model=MIXED[name], phase="decode", decode_form="pass_q_ring", cp=cp, tp=tp, pp=pp, dp=dp, ep=ep,
            topology=topology, dtype="fp8",
        )  # fmt: skip
    except InfeasibleError:
        assume(False)
    assert simulated(dep, context, batch, 0, structure_of(dep, context, batch)).audit() == SOUND


@settings(max_examples=80)
@given(
    st.integers(1, 40).map(window) | st.integers(1, 40).map(chunked) | st.integers(1, 40).map(sparse) | st.just(GQA),
    st.integers(1, 200),
    st.integers(2, 6),
    st.integers(1, 13),
)
def test_a_step_of_the_ring_attends_what_is_seen(attention, context, cp, batch):
    """The queries of one owner over a share of what each of them sees, counted key by key; the choice goes along."""
    dep = deploy(model=small_model(attention=attention, n_layers=1), phase="decode", cp=cp, decode_form="pass_q_ring")
    load = build_load(dep, context, batch, 0)
    seen = len(needed_keys(attention, context - 1))
    if attention.indexer is not None:
        seen = min(context, attention.indexer.top_k)
    owned = max(len(range(rank, batch, cp)) for rank in range(cp))
    share = max(len(range(rank, seen, cp)) for rank in range(cp))
    (core,) = parts_by_key(dep, load)["ring_partial", 0]
    width, elements, query = (32, 64, 16) if attention.kind == "gqa" else (72, 40, 40)
    assert core.flops == owned * 2 * 8 * width * share
    choice = 4 * owned * share if attention.indexer else 0
    assert core.bytes == owned * share * elements * 2 + owned * 8 * width * 2 + choice
    sent = message_bytes(dep, load, dep.model.kinds[0], ("cp_pass_q_ring", 0))
    assert sent == owned * (8 * query * 2 + (4 * attention.indexer.top_k if attention.indexer else 0))
    scored = [p for p in parts_by_key(dep, load)["qkv", 0] if p.flop_class == "indexer" and p.unit == "attention"]
    # Every key of the context by the owner: products of 16 elements and a weight for each of 4 heads.
    assert [p.flops for p in scored] == ([owned * 2 * context * 4 * 17] if attention.indexer else [])


@pytest.mark.parametrize(("batch", "owned"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_owners_keep_what_their_own_queries_need(batch, owned):
    """States and keys of indexers of owned sequences, tails of windows of all of them."""
    dep = deploy(model=MIXED["delta"], phase="decode", cp=4, decode_form="pass_q_ring")
    flat = deploy(model=MIXED["delta"], phase="decode", cp=4)
    state = 8 * 8 * 6 * 4 + 3 * (2 * 32 + 48) * 2
    held = -(-1000 // 4) * 64 * 2
    assert MemoryModel(dep).at(1000, batch, 0).kv_bytes == 3 * owned * state + batch * held
    assert MemoryModel(flat).at(1000, batch, 0).kv_bytes == 3 * batch * state + batch * held
    dep = deploy(model=MIXED["sparse"], phase="decode", cp=4, decode_form="pass_q_ring")
    assert MemoryModel(dep).at(1000, batch, 0).kv_bytes == 2 * (batch * 250 * 40 * 2 + owned * 1000 * 20)


def test_a_batch_of_one_per_rank_is_shared_evenly():
    """With cp sequences every rank runs linear layers for one of them, in place of one rank for all."""
    dep = deploy(model=MIXED["lightning"], phase="decode", cp=4, decode_form="pass_q_ring")
    structure = structure_of(dep, 64, 4)
    ops = structure.ops
    run = simulated(dep, 64, 4, 0, structure)
    linear = run.find("attention", layer=0)
    assert sorted(ops.op_src[linear].tolist()) == [0, 1, 2, 3]
    assert len(np.unique(run.finish_s[linear])) == 1
