"""Decode with queries that go round: structure, bytes, closed forms, padding, conservation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import g5cp_vec
from g5cp_vec.runner.schema import KPIS

LAYERS, HEADS, HEAD_DIM, HIDDEN = 32, 32, 128, 4096  # llama-3.1-8b
BANDWIDTH, LATENCY = 450e9, 2e-6  # flat-450
BASE = {
    "model": "llama-3.1-8b", "chip": "h200-sxm", "topology": "flat-450", "phase": "decode",
    "decode_form": "pass_q_ring", "tp": 1, "seq_len": 65536,
}  # fmt: skip


def run(**keys):
    keys = {**BASE, **keys}
    if "n_chips" not in keys:
        keys["n_chips"] = keys["tp"] * keys["cp"] * keys.get("pp", 1) * keys.get("dp", 1)
    result = g5cp_vec.run({"fixed": keys})
    assert [getattr(result, kpi) for kpi in KPIS] == [0] * 6
    return result


@pytest.mark.parametrize(("cp", "batch"), [(2, 1), (2, 4), (3, 1), (4, 6), (8, 8)])
def test_bytes_in_closed_form(cp, batch):
    """Each owned sequence's query to the next rank cp - 1 times; an output in bf16 and a log-sum-exp in fp32 home."""
    result = run(cp=cp, batch=batch, tp=2)
    owned, heads = -(-batch // cp), HEADS // 2
    assert result.passq_query_bytes == LAYERS * (cp - 1) * owned * heads * HEAD_DIM * 2
    assert result.passq_reduce_bytes == LAYERS * (cp - 1) * owned * heads * (HEAD_DIM * 2 + 4)
    assert result.passkv_bytes is None
    assert result.decode_form == "pass_q_ring"


@pytest.mark.parametrize("cp", [2, 4])
def test_step_in_closed_form(cp, tmp_path):
    """A query round the ring and attention overlap; on one stream they take turns. The all-to-all follows."""
    query = LATENCY + HEADS * HEAD_DIM * 2 / BANDWIDTH
    # All cp - 1 outputs of a rank leave by its one link, and as many arrive.
    home = LATENCY + (cp - 1) * HEADS * (HEAD_DIM * 2 + 4) / BANDWIDTH
    free = run(cp=cp)
    part = free.attention_s / (cp * LAYERS)
    ring = max(cp * part, (cp - 1) * query + part)
    assert free.tpot_s - free.compute_s == pytest.approx(LAYERS * (ring + home - cp * part), rel=1e-9)
    path = tmp_path / "serial.toml"
    path.write_text("decode_serial = true\nsend_recv_latency_us = 30\nall_to_all_latency_us = 80\n")
    serial = run(cp=cp, runtime=str(path))
    waits = (cp - 1) * (query + 30e-6) + home + 80e-6
    assert serial.tpot_s - serial.compute_s == pytest.approx(LAYERS * waits, rel=1e-9)
    assert serial.exposed_comm_s == pytest.approx(LAYERS * waits, rel=1e-9)


def test_too_few_sequences_are_padded():
    """A rank without a sequence works on padding: batch 1 costs what batch cp does."""
    one, four, five = run(cp=4, batch=1), run(cp=4, batch=4), run(cp=4, batch=5)
    assert one.tpot_s == four.tpot_s < five.tpot_s
    assert one.kv_bytes * 4 == four.kv_bytes


def test_without_cp_the_forms_are_one():
    ring, flat = run(cp=1, batch=3), run(cp=1, batch=3, decode_form="pass_q")
    ignored = ("decode_form", "point_id")
    assert {k: v for k, v in ring.to_dict().items() if k not in ignored} == {
        k: v for k, v in flat.to_dict().items() if k not in ignored
    }


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(["llama-3.1-8b", "deepseek-v3-671b", "qwen3-235b-a22b"]),
    topology=st.sampled_from(["flat-450", "hgx-8"]),
    cp=st.integers(1, 5),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 2),
    dp=st.integers(1, 2),
    batch=st.integers(1, 7),
    seq_len=st.integers(1, 40_000),
)
def test_conservation(model, topology, cp, tp, pp, dp, batch, seq_len):
    ep = dp * tp if model != "llama-3.1-8b" else 1
    run(model=model, topology=topology, cp=cp, tp=tp, pp=pp, dp=dp, ep=ep, batch=batch, seq_len=seq_len)
