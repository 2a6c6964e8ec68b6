"""Collectives of pcp and dcp groups, and of gathering for experts, last as measured; what is not measured is named."""

from __future__ import annotations

import pytest
from test_wires import ENGINE, NCCL, measured_s, runtime

import g5cp_vec

LAYERS, HIDDEN, HEADS, WIDTH, N_EXPERTS = 94, 4096, 64, 128, 128
LATENCY_S, RATE = 2e-6, 450e9
POINT = {
    "model": "qwen3-235b-a22b", "dtype": "fp8", "chip": "h200-sxm", "topology": "hgx-8", "phase": "decode", "cp": 1,
    "n_chips": 8, "seq_len": 4096, "ep": 8, "moe_dispatch": "all_gather",
}  # fmt: skip


def result(**keys):
    return g5cp_vec.run({"fixed": {**POINT, **keys}})


def wires_s(collective, op, size, message):
    """A call whose messages have so many bytes, without a library."""
    halves = 2 if op == "all_reduce" else 1
    if collective == "ring":
        return halves * (size - 1) * (LATENCY_S + message / RATE)
    return halves * (LATENCY_S + (size - 1) * message / RATE)


def longer_s(collective, calls):
    """How much longer the measured calls last; (times, operation, size, message bytes) each."""
    return sum(
        times * (measured_s("nccl", size * message, size, op) - wires_s(collective, op, size, message))
        for times, op, size, message in calls
    )


def ceil(a, b):
    return -(-a // b)


def tp_calls(batch, tp):
    return (2 * LAYERS, "all_reduce", tp, ceil(batch * HIDDEN * 2, tp))


def expert_calls(batch, replicas):
    return [
        (LAYERS, "all_gather", replicas, batch * HIDDEN * 2),
        (LAYERS, "all_gather", replicas, batch * N_EXPERTS * 2),
        (LAYERS, "reduce_scatter", replicas, batch * HIDDEN * 2),
    ]


def merge_calls(form, batch, heads, size):
    """Queries gathered over the heads of a dcp group; partial outputs with log-sum-exps exchanged and merged."""
    queries = (LAYERS, "all_gather", size, batch * heads * WIDTH * 2)
    if form == "dcp_ag_rs":
        sums = (LAYERS, "all_gather", size, batch * heads * size * 4)
        return [queries, sums, (LAYERS, "reduce_scatter", size, batch * heads * WIDTH * 2)]
    per_head = (WIDTH + 1) * 4 if form == "dcp_a2a_fp32" else (WIDTH + 2) * 2
    return [queries, (LAYERS, "alltoall", size, batch * heads * per_head)]


@pytest.mark.parametrize("collective", ["ring", "direct"])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("form", ["dcp_a2a_fp32", "dcp_a2a", "dcp_ag_rs"])
def test_merging_over_dcp_lasts_as_measured(tmp_path, form, batch, collective):
    """A decode step does one thing after another: what libraries take longer than wires is added to it."""
    keys = {"tp": 8, "dcp": 2, "decode_form": form, "batch": batch, "collective": collective}
    ideal, nccl = (result(**keys, runtime=name) for name in ("ideal", runtime(tmp_path, NCCL)))
    expected = longer_s(collective, [tp_calls(batch, 8), *merge_calls(form, batch, HEADS // 8, 2)])
    assert nccl.tpot_s - ideal.tpot_s == pytest.approx(expected, rel=1e-6)
    assert (nccl.dcp_bytes, nccl.tp_bytes) == (ideal.dcp_bytes, ideal.tp_bytes)
    assert nccl.unmeasured_collectives is None


@pytest.mark.parametrize("collective", ["ring", "direct"])
@pytest.mark.parametrize("batch", [1, 64])
def test_gathering_over_pcp_lasts_as_measured(tmp_path, batch, collective):
    keys = {"tp": 4, "pcp": 2, "batch": batch, "collective": collective}
    ideal, nccl = (result(**keys, runtime=name) for name in ("ideal", runtime(tmp_path, NCCL)))
    calls = [
        tp_calls(batch, 4),
        *expert_calls(batch, 2),
        (LAYERS, "all_gather", 2, batch * HEADS // 4 * (WIDTH + 1) * 4),  # partial outputs in fp32
        (1, "all_gather", 2, batch * HIDDEN * 2),  # hidden states before the head
    ]
    assert nccl.tpot_s - ideal.tpot_s == pytest.approx(longer_s(collective, calls), rel=1e-6)
    assert (nccl.pcp_bytes, nccl.ep_bytes) == (ideal.pcp_bytes, ideal.ep_bytes)


@pytest.mark.parametrize("collective", ["ring", "direct"])
def test_experts_of_replicas_are_fed_as_measured(tmp_path, collective):
    keys = {"tp": 1, "dp": 8, "batch": 64, "collective": collective}
    ideal, nccl = (result(**keys, runtime=name) for name in ("ideal", runtime(tmp_path, NCCL)))
    assert nccl.tpot_s - ideal.tpot_s == pytest.approx(longer_s(collective, expert_calls(64, 8)), rel=1e-6)


def test_keys_and_values_of_a_prefill_are_gathered_as_measured(tmp_path):
    """Nothing overlaps: 2048 rows of a rank, one head's keys and values of 128 elements each."""
    keys = {"tp": 4, "pcp": 2, "phase": "prefill"}
    ideal, nccl = (result(**keys, runtime=name) for name in ("ideal", runtime(tmp_path, NCCL)))
    rows = 2048
    calls = [
        tp_calls(rows, 4),
        *expert_calls(rows, 2),
        (LAYERS, "all_gather", 2, rows * 2 * WIDTH * 2),
        (1, "all_gather", 2, rows * HIDDEN * 2),
    ]
    assert nccl.ttft_s - ideal.ttft_s == pytest.approx(longer_s("ring", calls), rel=1e-6)


@pytest.mark.parametrize("collective", ["ring", "direct"])
def test_latents_merged_over_tp_and_pcp_ranks(tmp_path, collective):
    """128 heads of 512 on eight ranks; all else is alike in both kernels, so that it cancels."""
    batch, layers = 16, 61
    keys = {"model": "deepseek-v3-671b", "tp": 4, "pcp": 2, "dcp": 8, "cp_semantics": "orthogonal", "batch": batch}
    calls = {
        "dcp_a2a": [
            (layers, "alltoall", 8, batch * 16 * (512 + 2) * 2),
            (layers, "all_gather", 2, batch * 16 * 512 * 2),
        ],
        "dcp_ag_rs": [
            (layers, "all_gather", 8, batch * 128 * 4),
            (layers, "all_reduce", 8, batch * 128 * 512 * 2 // 8),
        ],
    }
    seconds = {}
    for form in calls:
        same = keys | {"decode_form": form, "collective": collective}
        for name, text in (("nccl", NCCL), ("engine", ENGINE)):
            measured = result(**same, runtime=runtime(tmp_path, text))
            seconds[form, name] = measured.tpot_s
            assert measured.unmeasured_collectives is None
            assert measured.lost_bytes == measured.lost_ops == 0
        seconds[form, "ideal"] = result(**same, runtime="ideal").tpot_s
    longer = {name: seconds["dcp_a2a", name] - seconds["dcp_ag_rs", name] for name in ("ideal", "nccl", "engine")}
    expected = longer_s(collective, calls["dcp_a2a"]) - longer_s(collective, calls["dcp_ag_rs"])
    assert longer["nccl"] - longer["ideal"] == pytest.approx(expected, rel=1e-6)
    # An engine's own all-reduce is for tp groups: it changes both alike.
    assert seconds["dcp_a2a", "engine"] < seconds["dcp_a2a", "nccl"]
    assert longer["engine"] == pytest.approx(longer["nccl"], rel=1e-6)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_what_leaves_a_switch_is_named(tmp_path, phase):
    """Two nodes: tp groups and dcp groups inside them are measured, pcp and replicas across are not."""
    keys = {"tp": 8, "pcp": 2, "dcp": 2, "n_chips": 16, "ep": 16, "phase": phase}
    named = result(**keys, runtime=runtime(tmp_path, NCCL)).unmeasured_collectives
    across = {"prefill": "pcp_kv", "decode": "pcp_partial"}[phase]
    assert named == f"moe_hidden, moe_logits, moe_sums, pcp_hidden, {across}"
    assert result(**keys, runtime="ideal").unmeasured_collectives is None
    # Latency and bandwidth of the network, as without a library.
    wide = {"rank_order": ["cp", "tp", "pp", "dp"]}
    inside = result(**keys, **wide, runtime=runtime(tmp_path, NCCL)).unmeasured_collectives
    assert "pcp" not in inside
    assert "tp_chunk" in inside


def test_a_chip_without_tables_and_a_sum_over_ranks_of_an_expert(tmp_path):
    library = runtime(tmp_path, NCCL)
    assert "tp_chunk" in result(tp=8, chip="b300-sxm", runtime=library).unmeasured_collectives
    split = result(tp=1, dp=8, ep=4, moe_dispatch="all_to_all", runtime=library)
    assert split.unmeasured_collectives == "ep_gather"


def test_experts_under_pcp_are_exchanged_as_measured_too(tmp_path):
    """All-to-all over all ranks of both pcp coordinates."""
    keys = {"tp": 4, "pcp": 2, "moe_dispatch": "all_to_all", "batch": 64}
    ideal, nccl = (result(**keys, runtime=name) for name in ("ideal", runtime(tmp_path, NCCL)))
    message = ceil(2 * 64 * 8, 64) * HIDDEN * 2
    exchange = measured_s("nccl", 8 * message, 8, "alltoall") - wires_s("direct", "alltoall", 8, message)
    calls = [
        tp_calls(64, 4),
        (LAYERS, "all_gather", 2, 64 * HEADS // 4 * (WIDTH + 1) * 4),
        (1, "all_gather", 2, 64 * HIDDEN * 2),
    ]
    expected = longer_s("ring", calls) + 2 * LAYERS * exchange
    assert nccl.tpot_s - ideal.tpot_s == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("semantics", ["multiplicative", "orthogonal"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("layout", [(8, 1, 8), (4, 2, 4), (4, 2, 1)])
def test_sparse_attention_is_measured_wherever_it_sends(tmp_path, semantics, phase, layout):
    """Every gather and exchange of every way lies behind the switch of a node."""
    tp, pcp, dcp = layout
    if semantics == "orthogonal" and pcp * dcp > pcp:
        dcp = tp * pcp
    path = tmp_path / "sparse.toml"
    path.write_text(MODEL)
    keys = {"model": str(path), "tp": tp, "pcp": pcp, "dcp": dcp, "cp_semantics": semantics, "phase": phase, "ep": 8}
    nccl = result(**keys, runtime=runtime(tmp_path, NCCL))
    assert nccl.unmeasured_collectives is None
    assert nccl.lost_bytes == nccl.lost_ops == nccl.order_violations == 0
    ideal = result(**keys, runtime="ideal")
    assert (nccl.pcp_bytes, nccl.dcp_bytes) == (ideal.pcp_bytes, ideal.dcp_bytes)
    assert nccl.step_s != ideal.step_s


MODEL = """
hidden = 1024
vocab = 4000
n_layers = 2
dtype = "bf16"
d_ff = 2048
[attention]
kind = "mla"
n_heads = 32
q_lora_rank = 256
kv_lora_rank = 512
qk_nope_head_dim = 128
qk_rope_head_dim = 64
v_head_dim = 128
[attention.indexer]
n_heads = 16
head_dim = 128
top_k = 512
"""
