"""Runtimes: blocking host steps, constants, latencies of calls, slow-down by transfers, all-reduces over nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import PLAIN_H200

import g5cp_vec
from g5cp_vec.config.runtime import Runtime, load_runtime
from g5cp_vec.cost.fixed import slowed
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.collectives import node_members
from g5cp_vec.runner.schema import KPIS

LAYERS = 32  # of llama-3.1-8b
BASE = {"model": "llama-3.1-8b", "chip": PLAIN_H200, "topology": "flat-450", "phase": "prefill", "tp": 1}


@pytest.fixture
def point(tmp_path):
    """Run a point under a runtime given as TOML; every audit must be clean."""

    def run(runtime="", fidelity="exact", **keys):
        path = tmp_path / "runtime.toml"
        path.write_text(runtime)
        keys = {**BASE, "runtime": str(path), **keys}
        keys.setdefault("n_chips", keys["tp"] * keys["cp"])
        result = g5cp_vec.run({"fixed": keys}, fidelity=fidelity)
        assert {getattr(result, kpi) for kpi in KPIS} == {None if keys.get("path") == "math" else 0}
        return result

    return run


def test_overheads_of_a_phase():
    runtime = Runtime(
        name="r", launch_s=2e-6, graphs=("decode",), prefill_op_overhead_s=1e-6, decode_op_overhead_s=5e-7
    )
    assert (runtime.op_overhead_s("prefill"), runtime.op_overhead_s("decode")) == (3e-6, 5e-7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('graphs = "decode"', "graphs: expected a list of"),
        ('graphs = ["train"]', "graphs[0]: expected 'prefill' or 'decode', got 'train'"),
        ("ring_step_sync_us = -1", "ring_step_sync_us: expected"),
        ('prefill_all_reduce = "tree"', "prefill_all_reduce: expected 'flat', 'rails' or 'hierarchical', got 'tree'"),
        ("ring_sync_us = 1", "unknown key 'ring_sync_us'; did you mean 'ring_step_sync_us'?"),
    ],
)
def test_hostile_runtimes(text, message, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_runtime(str(path))
    assert message in str(refused.value)


@pytest.mark.parametrize("cp", [2, 3, 8])
@pytest.mark.parametrize("seq_len", [2048, 65536])
@pytest.mark.parametrize("sync_us", [1.0, 400.0])
def test_a_blocking_host_serialises_the_ring(point, cp, seq_len, sync_us):
    """From the first step's start: cp - 1 times the slower of step and transfer, then host, and a last step."""
    free, blocked = point(cp=cp, seq_len=seq_len), point(f"ring_step_sync_us = {sync_us}", cp=cp, seq_len=seq_len)
    step = blocked.ring_compute_s / (cp * LAYERS)
    transfer = blocked.ring_comm_s / ((cp - 1) * LAYERS)
    sync = sync_us * 1e-6
    expected = LAYERS * ((cp - 1) * (max(step, transfer) + sync) + step)
    assert blocked.ring_s == pytest.approx(expected, rel=1e-9)
    assert blocked.overhead_s == pytest.approx(cp * LAYERS * sync, rel=1e-12)
    assert blocked.ring_compute_s == pytest.approx(free.ring_compute_s, rel=1e-12)
    # Every step of every layer waits for the host, the first one too.
    assert blocked.ttft_s >= free.ttft_s + cp * LAYERS * sync * (1 - 1e-12)
    assert blocked.passkv_bytes == free.passkv_bytes


def test_a_blocking_host_leaves_layers_that_repeat(point):
    text = "ring_step_sync_us = 300\nsend_recv_latency_us = 20"
    exact = point(text, cp=4, seq_len=32768)
    full = point(text, cp=4, seq_len=32768, fidelity="full")
    assert exact.ttft_s == pytest.approx(full.ttft_s, rel=1e-12)
    assert exact.n_ops_simulated < full.n_ops_simulated / 20


def test_an_empty_runtime_is_the_ideal_one(point):
    nothing = point(cp=4, seq_len=8192)
    ideal = g5cp_vec.run({"fixed": {**BASE, "runtime": "ideal", "n_chips": 4, "cp": 4, "seq_len": 8192}})
    ignored = ("runtime", "point_id")
    assert {k: v for k, v in nothing.to_dict().items() if k not in ignored} == {
        k: v for k, v in ideal.to_dict().items() if k not in ignored
    }


@pytest.mark.parametrize("path", ["g5", "math"])
def test_constants_of_layers_and_requests(point, path):
    keys = {"cp": 1, "seq_len": 4096, "path": path}
    bare = point(**keys)
    text = "prefill_layer_us = 10\nprefill_request_us = 1000\ncached_prefill_request_us = 5000\ndecode_layer_us = 7777"
    loaded, cached, bare_cached = (
        point(text, **keys),
        point(text, **keys, cached_tokens=1024),
        point(**keys, cached_tokens=1024),
    )
    constant = LAYERS * 10e-6 + 1e-3
    assert loaded.ttft_s - bare.ttft_s == pytest.approx(constant, rel=1e-9)
    assert cached.ttft_s - bare_cached.ttft_s == pytest.approx(constant + 5e-3, rel=1e-9)
    assert (loaded.overhead_s, cached.overhead_s) == (pytest.approx(constant), pytest.approx(constant + 5e-3))


def test_no_elementwise_kernel_is_shorter_than_the_floor(point):
    """Decode of one token: two norms, rotation, cache and activation of each layer; embedding and last norm."""
    keys = {"cp": 1, "seq_len": 64, "phase": "decode"}
    bare, floored = point(**keys), point("kernel_floor_us = 3", **keys)
    bytes_moved = LAYERS * (2 * 4 * 4096 * 2 + 2 * (32 + 8) * 128 * 2 + 2 * 8 * 128 * 2 + 3 * 14336 * 2) + 4 * 4096 * 2
    lacking = (5 * LAYERS + 2) * 3e-6 - bytes_moved / (4.8e12 * 0.8)
    assert floored.tpot_s - bare.tpot_s == pytest.approx(lacking, rel=1e-9)
    assert floored.overhead_s == pytest.approx(lacking, rel=1e-9)
    assert floored.breakdown().computes[0].seconds > 0
    long = {"cp": 1, "seq_len": 262144}
    assert point("kernel_floor_us = 3", **long).ttft_s == pytest.approx(point(**long).ttft_s, rel=1e-4)


def test_constants_of_decode(point):
    keys = {"cp": 1, "seq_len": 4096, "phase": "decode", "batch": 3}
    text = "decode_layer_us = 10\ndecode_request_us = 1000\nsplit_kv_sequence_us = 2\nprefill_layer_us = 7777"
    added = point(text, **keys).tpot_s - point(**keys).tpot_s
    assert added == pytest.approx(LAYERS * (10e-6 + 3 * 2e-6) + 1e-3, rel=1e-9)


def test_library_latency_adds_to_every_hop(point):
    keys = {"cp": 4, "seq_len": 1024}
    bare, late = point(**keys), point("send_recv_latency_us = 500", **keys)
    assert late.ring_comm_s - bare.ring_comm_s == pytest.approx(3 * LAYERS * 500e-6, rel=1e-9)


@given(compute=st.floats(1e-6, 1e-2), transfer=st.floats(1e-6, 1e-2), slowdown=st.floats(0, 2), n=st.just(20_000))
def test_slowed_is_what_stepping_through_time_gives(compute, transfer, slowdown, n):
    """Twin: advance in small steps, slower while the transfer lasts."""
    dt = max(compute * (1 + slowdown), transfer) / n
    rates = np.where(np.arange(n) * dt < transfer, 1 / (1 + slowdown), 1.0)
    done = np.cumsum(rates * dt)
    took = (np.searchsorted(done, compute) + 1) * dt
    assert float(slowed(compute, transfer, slowdown)) == pytest.approx(took, abs=3 * dt)


@pytest.mark.parametrize("cp", [2, 4])
def test_slow_down_of_ring_steps(point, cp):
    """All steps but the last are accompanied by a transfer, here a shorter one."""
    keys = {"cp": cp, "seq_len": 65536}
    bare, slow = point(**keys), point("overlap_slowdown = 0.25", **keys)
    transfer = 65536 // cp * 2 * 8 * 128 * 2 / 450e9
    added = LAYERS * (cp - 1) * transfer * 0.25 / 1.25
    assert slow.ring_compute_s - bare.ring_compute_s == pytest.approx(added, rel=1e-6)
    both = point("overlap_slowdown = 0.25\nring_step_sync_us = 100", **keys)
    assert both.ttft_s == pytest.approx(slow.ttft_s + LAYERS * cp * 1e-4, rel=1e-6)


HIDDEN_BYTES = 4096 * 2  # a token of llama-3.1-8b in bf16
NODE = """kind = "hgx"
node_size = 4
scale_up_gbytes_per_s = 400
scale_up_latency_us = 2
nics_per_node = 4
nic_gbytes_per_s = 50
scale_out_latency_us = 6
"""


@pytest.mark.parametrize(("tp", "nodes"), [(8, 2), (16, 4)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("way", ["rails", "hierarchical"])
def test_all_reduce_over_nodes(point, tmp_path, tp, nodes, phase, way):
    """Bytes and time of 2 all-reduces a layer, in closed form."""
    (tmp_path / "node.toml").write_text(NODE)
    keys = {"tp": tp, "cp": 1, "seq_len": 3000, "phase": phase, "topology": str(tmp_path / "node.toml")}
    bare = point(**keys)
    result = point(f'{phase}_all_reduce = "{way}"', **keys)
    tokens = 3000 if phase == "prefill" else 1
    total, k = tokens * HIDDEN_BYTES, tp // nodes
    if way == "rails":
        piece = -(-total // (tp * k))
        sent = 2 * (tp - 1) * k * piece
        seconds = 2 * (tp - 1) * max(2e-6 + (k - 1) * piece / 400e9, 6e-6 + piece / 50e9)
    else:
        owned = -(-total // k)
        share = -(-owned // nodes)
        sent = 2 * (k - 1) * owned + 2 * (nodes - 1) * share
        seconds = 2 * (k - 1) * (2e-6 + owned / 400e9) + 2 * (nodes - 1) * (6e-6 + share / 50e9)
    assert result.tp_bytes == 2 * LAYERS * sent
    assert result.comm_s == pytest.approx(2 * LAYERS * seconds, rel=1e-6)
    assert result.compute_s == pytest.approx(bare.compute_s, rel=1e-12)


def test_all_reduce_inside_a_node_is_flat(point, tmp_path):
    (tmp_path / "node.toml").write_text(NODE)
    keys = {"tp": 4, "cp": 2, "seq_len": 4096, "topology": str(tmp_path / "node.toml")}
    assert point('prefill_all_reduce = "rails"', **keys).ttft_s == point(**keys).ttft_s


@pytest.mark.parametrize(
    ("nodes", "members"),
    [
        ([[0, 0, 1, 1], [2, 2, 3, 3]], 2),
        ([[0, 0, 0, 0]], None),
        ([[0, 1, 2, 3]], None),
        ([[0, 0, 0, 1]], None),
        ([[0, 0, 1, 1], [2, 2, 2, 2]], None),
        ([[0, 0, 1, 1, 0, 0]], None),
        ([[0, 0, 0, 1, 1, 1]], 3),
    ],
)
def test_node_members(nodes, members):
    assert node_members(np.array(nodes, np.int32)) == members


@settings(max_examples=15, deadline=None)
@given(
    model=st.sampled_from(["llama-3.1-8b", "qwen3-235b-a22b"]),
    phase=st.sampled_from(["prefill", "decode"]),
    tp=st.sampled_from([2, 8, 16]),
    cp=st.integers(1, 3),
    dp=st.integers(1, 2),
    order=st.permutations(["tp", "cp", "pp", "dp"]),
    seq_len=st.integers(1, 20_000),
    cached=st.integers(0, 20_000),
)
def test_conservation_under_a_runtime_with_everything(model, phase, tp, cp, dp, order, seq_len, cached):
    point = {
        "model": model, "chip": "h100-96gb-500w", "topology": "gtt-hgx-8", "phase": phase, "n_chips": tp * cp * dp,
        "tp": tp, "cp": cp, "seq_len": seq_len, "cached_tokens": min(cached, seq_len - 1), "rank_order": order,
        "decode_form": "pass_q_ring",
    }  # fmt: skip
    result = g5cp_vec.run({"fixed": point})
    assert result.runtime == "meta-cp-study"
    assert [getattr(result, kpi) for kpi in KPIS] == [0] * 6
