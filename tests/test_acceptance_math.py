"""The closed form equals the event simulation where nothing overlaps: dense models over a switch."""

from __future__ import annotations

import pytest
from machines import PLAIN_H200
from test_acceptance_tools import MHA, MLA, small_model, sweep_rows, write_model

SWITCH = 'kind = "switch"\nchip_bandwidth_gbytes_per_s = {}\nlatency_us = {}\n'
# Both sides must agree on these to 1e-12 (times) or exactly (integers and texts).
TIMES = ("step_s", "ttft_s", "tpot_s", "compute_s", "attention_s", "overhead_s", "comm_s", "exposed_comm_s", "mfu",
         "tokens_per_s_per_chip")  # fmt: skip
EXACT = ("status", "weight_bytes", "kv_bytes", "activation_bytes", "buffer_bytes", "max_seq_len", "tp_bytes",
         "pp_bytes", "ep_bytes", "padded_seq_len")  # fmt: skip


def assert_math_equals_simulation(fixed, **axes):
    """Every pair of rows that differ in the path only; return the number of pairs."""
    rows = sweep_rows({"chip": PLAIN_H200, "cp": 1, **fixed}, path=["g5", "math"], **axes)
    half = len(rows) // 2
    for simulated, closed in zip(rows[:half], rows[half:], strict=True):
        assert (simulated["path"], closed["path"]) == ("g5", "math")
        for name in TIMES:
            if simulated[name] is None:
                assert closed[name] is None, name
            else:
                # comm_s is a sum of differences of the simulation's times: exact to the last digits of those.
                slack = 1e-12 * simulated["step_s"] if "comm" in name else 0.0
                assert closed[name] == pytest.approx(simulated[name], rel=1e-12, abs=slack), name
        for name in EXACT:
            assert closed[name] == simulated[name], name
        assert simulated["step_s"] > 0
        assert closed["n_events"] is None
    return half


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_math_equals_simulation(tp, pp):
    """Both phases, both collectives, several lengths and batches; 2 replicas side by side."""
    n = assert_math_equals_simulation(
        {"model": "llama-3.1-8b", "topology": "flat-450", "n_chips": 2 * tp * pp, "tp": tp, "pp": pp},
        phase=["prefill", "decode"], collective=["ring", "direct"], seq_len=[1, 1000, "128K"], batch=[1, 7],
    )  # fmt: skip
    assert n == 2 * 2 * 3 * 2


def test_math_equals_simulation_of_the_largest_dense_model():
    assert_math_equals_simulation(
        {"model": "llama-3.1-405b", "topology": "flat-450", "n_chips": 32, "tp": 8, "pp": 4},
        phase=["prefill", "decode"], collective=["ring", "direct"], seq_len=["8K", "1M"],
    )  # fmt: skip


@pytest.mark.parametrize("attention", [MHA, MLA], ids=["mha", "mla"])
def test_math_equals_simulation_of_small_and_odd_cases(tmp_path, attention):
    """Latency-bound steps, chunks that round up, an odd number of layers, cached tokens, tp_sp, overheads."""
    (tmp_path / "net.toml").write_text(SWITCH.format(0.5, 30.0))
    (tmp_path / "slow.toml").write_text("prefill_op_overhead_us = 3.0\ndecode_op_overhead_us = 1.0\n")
    fixed = {
        "model": write_model(tmp_path, small_model(attention=attention, n_layers=5, vocab=1001)),
        "topology": str(tmp_path / "net.toml"), "runtime": str(tmp_path / "slow.toml"), "n_chips": 16, "tp": 4,
        "pp": 2, "cached_tokens": 13,
    }  # fmt: skip
    assert_math_equals_simulation(
        fixed, phase=["prefill", "decode"], collective=["ring", "direct"], tp_sp=[False, True], seq_len=[14, 333],
        batch=[1, 3],
    )  # fmt: skip


def test_math_pays_for_what_an_expert_model_hides():
    """With experts the shared expert overlaps the dispatch: the closed form is an upper bound, not an equality."""
    rows = sweep_rows(
        {"chip": PLAIN_H200, "cp": 1, "model": "deepseek-v3-671b", "topology": "flat-450", "n_chips": 16, "tp": 2,
         "ep": 16, "phase": "prefill", "seq_len": "32K"},
        path=["g5", "math"],
    )  # fmt: skip
    simulated, closed = rows
    assert closed["step_s"] > simulated["step_s"] * 1.001
    assert closed["ep_bytes"] == simulated["ep_bytes"]


def test_math_by_hand(tmp_path):
    """One replica of one layer over two chips, added up with a pencil."""
    (tmp_path / "net.toml").write_text(SWITCH.format(1.0, 10.0))
    # hidden 64, MHA 8 heads of 16, tp 2, S = 100 tokens, bf16, d_ff 128, vocab 1000. H200: 4.8e12 * 0.8 B/s; every
    # op is bound by memory here (the largest product has 100 * 64 * 192 * 2 = 2.5 MFLOP, 4 ns; its bytes take 20 ns).
    model = write_model(tmp_path, small_model(attention=MHA, n_layers=1))
    (_, row) = sweep_rows(
        {"chip": PLAIN_H200, "cp": 1, "model": model, "topology": str(tmp_path / "net.toml"), "n_chips": 2, "tp": 2,
         "phase": "prefill", "seq_len": 100},
        path=["g5", "math"],
    )  # fmt: skip
    t, h = 100, 64
    moved = 2 * (
        2 * t * h  # embedding: table row in, state out
        + 4 * t * h  # residual and update in, sum and norm out
        + t * (h + 192) + h * 192  # qkv of 4 heads: 3 * 64 columns
        + 2 * t * (64 + 64)  # rotary: queries and keys in and out
        + t * 128  # keys and values into the cache
        + t * 4 * 32 + t * 4 * 32  # attention: q, out; k, v
        + t * (64 + h) + 64 * h  # output projection
        + 4 * t * h  # residual, norm
        + t * (h + 128) + h * 128 + 3 * t * 64 + t * (64 + h) + 64 * h  # gate and up, activation, down
        + 2 * h + (h + 500) + h * 500  # head: last token, 500 of 1000 columns
    )  # fmt: skip
    # An all-reduce of 100 * 64 * 2 = 12,800 bytes over 2: two steps of 10 us + 6,400 B / 1 GB/s = 16.4 us; two of them.
    comm_s = 4 * (10e-6 + 6400 / 1e9)
    assert row["comm_s"] == pytest.approx(comm_s, rel=1e-12)
    assert row["ttft_s"] == pytest.approx(moved / (4.8e12 * 0.8) + comm_s, rel=1e-12)
