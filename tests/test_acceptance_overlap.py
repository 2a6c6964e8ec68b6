"""Communication hides behind computation exactly as far as the graph and the links allow.

Every time here comes from the event simulation of the real graph; costs are chosen so that the arithmetic of the
comments is exact in binary: bandwidth 1 B/s, no latency, and everything but what is named costs nothing.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import PLAIN_H200
from test_acceptance_tools import (
    chosen_costs,
    deploy,
    hgx,
    one_point,
    ops_of,
    play,
    ring_s,
    serialised,
    small_model,
    sweep_rows,
    switch,
    with_costs,
)

from g5cp_vec.engine.arrays import COMPUTE, FLOW
from g5cp_vec.mapping.structure import build_structure

ONE_LAYER = small_model(n_layers=1)
RATIOS = [Fraction(n, 16) for n in range(8, 33)]  # compute / communication over the whole band [0.5, 2.0]


@lru_cache(maxsize=4)
def ring_graph(cp, serial=False):
    """A structure of one layer on a switch with a ring of ``cp``, and its graph, serialised if asked for."""
    structure = build_structure(deploy(model=ONE_LAYER, cp=cp))
    return structure, serialised(structure.ops) if serial else structure.ops


def play_ring(structure, ops, step_s, message_s):
    """Length of one layer's ring on every rank, all equal; and of the whole pass, where nothing else costs anything."""
    start, finish = play(ops, chosen_costs(structure, {"ring_step": step_s}, {"cp_pass_kv": message_s}))
    lengths = {ring_s(ops, start, finish, chip) for chip in range(ops.n_chips)}
    assert len(lengths) == 1
    assert finish.max() == max(lengths)
    return lengths.pop()


def ring_time(step_s, message_s, cp, serial=False):
    return play_ring(*ring_graph(cp, serial), step_s, message_s)


def assert_overlap(total, compute, comm):
    """The specification's double inequality."""
    assert total <= 1.1 * max(compute, comm)
    assert total <= 0.7 * (compute + comm)


def band(cp):
    """(step, message) with cp * step / ((cp - 1) * message) over the band; exact in binary."""
    for ratio in RATIOS:
        # step = ratio * (cp - 1), message = cp: compute = cp * step = ratio * cp (cp - 1), comm = cp (cp - 1).
        yield float(ratio * (cp - 1)), float(cp)


@pytest.mark.parametrize("cp", [16, 32])
def test_overlap_effective(cp):
    ratios = set()
    for step, message in band(cp):
        compute, comm = cp * step, (cp - 1) * message
        ratios.add(compute / comm)
        assert_overlap(ring_time(step, message, cp), compute, comm)
    assert (min(ratios), max(ratios)) == (0.5, 2.0)


@pytest.mark.parametrize("cp", [16, 32])
def test_overlap_effective_fails_on_a_serialised_graph(cp):
    for step, message in band(cp):
        compute, comm = cp * step, (cp - 1) * message
        total = ring_time(step, message, cp, serial=True)
        # Step, send, step, send, …: nothing runs beside anything else.
        assert total == compute + comm
        with pytest.raises(AssertionError):
            assert_overlap(total, compute, comm)
        for one_half in (1.1 * max(compute, comm), 0.7 * (compute + comm)):
            assert total > one_half


def closed_form(step, message, cp):
    return max(cp * step, (cp - 1) * message + step)


@pytest.mark.parametrize("cp", range(2, 65))
def test_overlap_effective_closed_form(cp):
    """T = max(cp c, (cp - 1) m + c), to the last bit, on both sides of c = m and at it."""
    for step, message in ((1, 1), (2, 1), (1, 2), (0.25, 3), (3, 0.25), (1, 1.125), (1.125, 1)):
        assert ring_time(step, message, cp) == closed_form(step, message, cp)
        # A serialised graph takes the sum and never the closed form.
        assert ring_time(step, message, cp, serial=True) == cp * step + (cp - 1) * message


def test_overlap_effective_in_every_replica_and_shard():
    """tp and dp multiply the rings on a switch, not their length: every chip has links of its own."""
    for changes in ({"tp": 2}, {"dp": 3}, {"tp": 2, "dp": 2, "rank_order": ("dp", "cp", "tp", "pp")}):
        structure = build_structure(deploy(model=ONE_LAYER, cp=4, **changes))
        assert play_ring(structure, structure.ops, 3.0, 5.0) == 3 * 5 + 3
        assert play_ring(structure, structure.ops, 5.0, 3.0) == 4 * 5


@settings(max_examples=60)
@given(
    cp=st.integers(2, 12),
    message=st.integers(0, 40),
    data=st.data(),
)
def test_overlap_effective_unequal_steps(cp, message, data):
    """T = max over j < cp of (j m + sum of c_i for i >= j), each step with a cost of its own."""
    steps = data.draw(st.lists(st.integers(0, 40), min_size=cp, max_size=cp))
    structure = build_structure(deploy(model=ONE_LAYER, cp=cp))
    first_id = len(structure.keys.durations)
    own = {op: first_id + int(structure.ops.op_step[op]) for op in ops_of(structure.ops, "attention", COMPUTE)}
    ops = with_costs(structure.ops, own)
    _, finish = play(ops, chosen_costs(structure, {}, {"cp_pass_kv": message}, more=tuple(steps)))
    assert finish.max() == max(j * message + sum(steps[j:]) for j in range(cp))


def test_overlap_effective_with_latency_and_many_layers():
    """Latency is paid by every hop of the ring: m becomes lat + m; layers follow one another."""
    # lat 0.5, m = 2 -> 2.5; c = 1, cp = 4: 3 * 2.5 + 1 = 8.5 a layer, 3 layers.
    structure = build_structure(deploy(model=small_model(n_layers=3), cp=4, topology=switch(1.0, 0.5)))
    costs = chosen_costs(structure, {"ring_step": 1}, {"cp_pass_kv": 2})
    start, finish = play(structure.ops, costs)
    assert [ring_s(structure.ops, start, finish, 2, layer) for layer in range(3)] == [8.5] * 3
    assert finish.max() == 25.5


def test_overlap_effective_in_the_columns_of_a_result(tmp_path):
    """ring_s is the closed form of the row's own ring_compute_s and of the bytes over the bandwidth."""
    (tmp_path / "net.toml").write_text('kind = "switch"\nchip_bandwidth_gbytes_per_s = 5.0\nlatency_us = 0.0\n')
    rows = sweep_rows(
        {"phase": "prefill", "model": "llama-3.1-8b", "chip": PLAIN_H200, "topology": str(tmp_path / "net.toml"),
         "n_chips": 16, "cp": 16},
        seq_len=["64K", "256K", "512K", "1M", "1536K", "4M"],
    )  # fmt: skip
    seen = []
    for row in rows:
        # 32 layers; a block is S / 16 tokens of 2 * 8 * 128 elements in bf16: 4096 bytes each.
        step, message = row["ring_compute_s"] / (32 * 16), row["seq_len"] / 16 * 4096 / 5e9
        assert row["ring_s"] == pytest.approx(32 * closed_form(step, message, 16), rel=1e-12)
        assert row["ring_comm_s"] == pytest.approx(32 * 15 * message, rel=1e-12)
        compute, comm = row["ring_compute_s"], row["ring_comm_s"]
        seen.append(compute / comm)
        if 0.5 <= compute / comm <= 2.0:
            assert_overlap(row["ring_s"], compute, comm)
    # The band is crossed, from communication-bound to compute-bound.
    assert min(seen) < 0.5
    assert max(seen) > 2.0
    assert any(0.5 <= ratio <= 2.0 for ratio in seen)


# --- The two ends -----------------------------------------------------------------------------------------------------


def exposed_share(row):
    """Part of the ring that is not its computing."""
    return max(0.0, 1 - row["ring_compute_s"] / row["ring_s"])


@pytest.mark.parametrize(("model", "tp"), [("llama-3.1-8b", 1), ("deepseek-v3-671b", 8)])
@pytest.mark.parametrize("topology", ["flat-450", "hgx-8"])
def test_overlap_metamorphic(model, tp, topology):
    """Large S / cp: within 10 % of pure compute. Small: at least ten times the exposure, and more than 1 %."""
    # In hgx-8 the ring crosses NICs; the default runtime has no overheads. Unsplit heads would hide everything even
    # at the small end: every ring step of MLA reads kv_b_proj, 17 MB of it without tp.
    fixed = {
        "phase": "prefill", "model": model, "chip": PLAIN_H200, "topology": topology, "n_chips": 16 * tp, "cp": 16,
        "tp": tp,
    }  # fmt: skip
    large, small = sweep_rows(fixed, seq_len=["1M", 1024])
    assert small["overhead_s"] == 0.0
    assert large["ring_s"] <= 1.1 * large["ring_compute_s"]
    assert large["ring_s"] >= large["ring_compute_s"] * (1 - 1e-12)
    assert exposed_share(small) > 0.01
    assert exposed_share(small) >= 10 * exposed_share(large)
    if tp == 1:
        # The same through the reported rank's exposed communication, which is all the ring's.
        assert small["exposed_comm_s"] / small["step_s"] > 0.01
        assert small["exposed_comm_s"] / small["step_s"] >= 10 * large["exposed_comm_s"] / large["step_s"]


def test_overlap_metamorphic_cannot_tell_a_serialised_graph_apart():
    """Why the band is the criterion: at the large end a serial ring, too, is within 10 % of pure compute."""
    assert ring_time(1.0, 1 / 64, 16, serial=True) <= 1.1 * 16


def test_exposure_falls_as_contexts_grow():
    rows = sweep_rows(
        {"phase": "prefill", "model": "llama-3.1-8b", "chip": PLAIN_H200, "topology": "hgx-8", "n_chips": 16, "cp": 16},
        seq_len=["2K", "8K", "32K", "128K", "512K", "2M"],
    )
    shares = [exposed_share(row) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5
    assert shares[-1] < 1e-9


# --- Contention -------------------------------------------------------------------------------------------------------


def two_rings(nics, doctor=lambda ops, structure: ops, step=0.0):
    """Two replicas whose rings of 2 cross between the same two nodes; seconds until each ring's block has arrived."""
    # Fastest first dp, cp: chips 0 and 1 (node 0) are cp coordinate 0 of replicas 0 and 1, chips 2 and 3 (node 1)
    # coordinate 1. Every block crosses the NICs.
    dep = deploy(model=ONE_LAYER, cp=2, dp=2, topology=hgx(2, nics), rank_order=("dp", "cp", "tp", "pp"))
    structure = build_structure(dep)
    ops = doctor(structure.ops, structure)
    _, finish = play(ops, chosen_costs(structure, {"ring_step": step}, {"cp_pass_kv": 6}, ()))
    return [float(finish[op]) for op in ops_of(ops, "cp_pass_kv")], float(finish.max())


def without_second_ring(ops, structure):
    """Give replica 1's blocks no route: they are there, but use no link."""
    gone = {op for op in ops_of(ops, "cp_pass_kv") if ops.op_src[op] in (1, 3)}
    g = ops.graph
    keep = ~np.isin(g.route_op, list(gone))
    lengths = np.diff(g.route_indptr)
    lengths[list(gone)] = 0
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    graph = g._replace(
        route_indptr=indptr, route_indices=g.route_indices[keep].copy(), route_count=g.route_count[keep].copy(),
        route_op=g.route_op[keep].copy(),
    )  # fmt: skip
    return ops._replace(graph=graph)


def test_contention_shows_two_rings_over_one_nic():
    """6 bytes over a NIC of 1 B/s: 6 s alone, 12 s for two that share it in each direction."""
    alone, alone_s = two_rings(1, without_second_ring)
    assert sorted(alone) == [0.0, 0.0, 6.0, 6.0]
    assert two_rings(1) == ([12.0] * 4, 12.0)
    assert two_rings(1)[1] == 2 * alone_s
    # With a NIC per chip nothing is shared.
    assert two_rings(2) == ([6.0] * 4, 6.0)


def test_contention_can_unhide_what_overlap_hid():
    """Steps of 6 s hide a 6 s block (6 + 6 = 12 s) but not a block that takes 12 s (12 + 6 = 18 s)."""
    assert two_rings(2, step=6.0)[1] == 12.0
    assert two_rings(1, step=6.0)[1] == 18.0


def test_contention_shows_in_results_of_presets(tmp_path):
    """Four rings over four NICs against one NIC: communication-bound, the rings take four times as long."""
    hgx_toml = """
    kind = "hgx"
    node_size = 4
    scale_up_gbytes_per_s = 450.0
    scale_up_latency_us = 0.0
    nics_per_node = {}
    nic_gbytes_per_s = 1.0
    scale_out_latency_us = 0.0
    """
    rows = []
    for nics in (4, 1):
        path = tmp_path / f"net{nics}.toml"
        path.write_text(hgx_toml.format(nics))
        rows.append(one_point(
            phase="prefill", model="llama-3.1-8b", chip=PLAIN_H200, topology=str(path), n_chips=16, dp=4, cp=4,
            rank_order=["dp", "cp", "tp", "pp"], seq_len=4096,
        ))  # fmt: skip
    own, shared = rows
    assert shared["ring_comm_s"] == pytest.approx(4 * own["ring_comm_s"], rel=1e-12)
    # 32 layers, 3 sends of 1024 tokens of 4096 bytes at 1 GB/s.
    assert own["ring_comm_s"] == pytest.approx(32 * 3 * 1024 * 4096 / 1e9, rel=1e-12)


def lagging_group(ffn_of_second_group):
    """Two ring groups' worth of tp pairs in which one pair lags: end of each ring send and all-reduce step.

    tp 2, cp 2, 2 layers on a switch; chips 0, 1 are the tp pair A (cp 0), chips 2, 3 the pair B (cp 1). B's FFN in
    layer 0 takes ``ffn_of_second_group`` seconds, everything else computes in no time. Blocks have 16 bytes, chunks
    of the all-reduce 4.
    """
    structure = build_structure(deploy(model=small_model(n_layers=2), tp=2, cp=2))
    slow = len(structure.keys.durations)
    late = {op: slow for op in ops_of(structure.ops, "ffn", COMPUTE, 0) if structure.ops.op_src[op] in (2, 3)}
    ops = with_costs(structure.ops, late)
    costs = chosen_costs(structure, {}, {"cp_pass_kv": 16, "tp_chunk": 4}, more=(ffn_of_second_group,))
    start, finish = play(ops, costs)

    def times(reason, layer, src, dst):
        found = [op for op in ops_of(ops, reason, FLOW, layer) if (ops.op_src[op], ops.op_dst[op]) == (src, dst)]
        return [(float(start[op]), float(finish[op])) for op in sorted(found, key=lambda op: start[op])]

    return times


def test_contention_of_a_ring_with_an_all_reduce():
    """A's blocks of layer 1 reach B while B is still all-reducing layer 0: B's links are shared by halves.

    Layer 0: blocks 0-16 s, all-reduce after attention 16-24 (two steps of 4 s). FFN: A none, B 8 s. A's second
    all-reduce 24-32, B's starts at 32. At 32 A sends its blocks of layer 1 to B (A0 up, B0 down) and B0, B1 exchange
    chunks (B0 up, B1 down and the reverse). B0's down link carries both: half each. A chunk of 4 bytes takes 8 s, the
    two steps 16 s, to 48. By then 8 bytes of the block have arrived, the other 8 follow at full rate: 56, instead of
    48 on its own. The ring is slowed by 8 s, the bytes of the all-reduce over the bandwidth.
    """
    times = lagging_group(8.0)
    assert times("cp_pass_kv", 0, 0, 2) == [(0.0, 16.0)]
    assert times("tp", 0, 0, 1) == [(16.0, 20.0), (20.0, 24.0), (24.0, 28.0), (28.0, 32.0)]
    assert times("tp", 0, 2, 3) == [(16.0, 20.0), (20.0, 24.0), (32.0, 40.0), (40.0, 48.0)]
    assert times("cp_pass_kv", 1, 0, 2) == times("cp_pass_kv", 1, 1, 3) == [(32.0, 56.0)]


def test_contention_ends_when_the_all_reduce_does_not_meet_the_ring():
    """B 24 s late: its all-reduce starts at 48, when A's blocks (32-48) have just arrived."""
    times = lagging_group(24.0)
    assert times("cp_pass_kv", 1, 0, 2) == [(32.0, 48.0)]
    assert times("tp", 0, 2, 3)[2:] == [(48.0, 52.0), (52.0, 56.0)]


def test_contention_by_a_part_of_the_all_reduce():
    """B 20 s late: chunks start at 44, 12 of 16 bytes have arrived, the other 4 take 8 s at half rate: 52, not 48.

    The first chunk (4 bytes) ends with it, at 52; the second then has the link for itself: 56.
    """
    times = lagging_group(20.0)
    assert times("cp_pass_kv", 1, 0, 2) == [(32.0, 52.0)]
    assert times("tp", 0, 2, 3)[2:] == [(44.0, 52.0), (52.0, 56.0)]
