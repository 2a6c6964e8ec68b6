"""Expert parallelism: who holds which experts, who sends what to whom, who waits for whom.

dp * tp = moe_tp * ep; in (dp, tp) order consecutive moe_tp ranks share the experts of one EP rank, and EP groups
stride over them.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from test_acceptance_tools import (
    EXPERTS,
    ancestors,
    bytes_of_ops,
    chosen_costs,
    deploy,
    edges,
    flows_between,
    one_point,
    ops_of,
    play,
    predecessors,
    priced,
    small_model,
    switch,
    with_costs,
)

from g5cp_vec.engine.arrays import COMPUTE, FLOW
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.structure import build_structure

ONE = small_model(name="one", n_layers=1, moe=EXPERTS)  # a single layer, of 16 experts of width 64, and a shared one
NO_SHARED = small_model(name="unshared", n_layers=1, moe=EXPERTS.model_copy(update={"n_shared": 0}))


def everyone(*groups):
    """Every ordered pair within each group."""
    return sorted(pair for group in groups for pair in permutations(group, 2))


def around(*groups):
    """Every member to the next."""
    return sorted((a, b) for group in groups for a, b in zip(group, (*group[1:], group[0]), strict=True))


GROUPS = [
    # degrees, EP groups, groups that split an expert and span replicas (None: they lie inside a tp group)
    ({"dp": 4, "tp": 2, "ep": 8}, [range(8)], None),
    ({"dp": 4, "tp": 2, "ep": 4}, [[0, 2, 4, 6], [1, 3, 5, 7]], None),  # moe_tp 2 = tp
    ({"dp": 4, "tp": 2, "ep": 2}, [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),  # moe_tp 4
    ({"dp": 4, "tp": 2, "ep": 1}, [], [range(8)]),  # moe_tp 8
    ({"dp": 1, "tp": 4, "ep": 2}, [[0, 2], [1, 3]], None),  # moe_tp 2, half a tp group
    ({"dp": 1, "tp": 4, "ep": 4}, [range(4)], None),
    # At each (cp, pp) coordinate on its own: chip = t + 2 c + 4 d.
    ({"dp": 2, "tp": 2, "cp": 2, "ep": 2}, [[0, 4], [1, 5], [2, 6], [3, 7]], None),
    ({"dp": 2, "tp": 2, "cp": 2, "ep": 1}, [], [[0, 1, 4, 5], [2, 3, 6, 7]]),
    # The order of ranks is (dp, tp) whatever the chips: chip = d + 2 t.
    ({"dp": 2, "tp": 2, "ep": 2, "rank_order": ("dp", "tp", "cp", "pp")}, [[0, 1], [2, 3]], None),
]
IDS = ["-".join(f"{k}{v}" for k, v in degrees.items() if isinstance(v, int)) for degrees, _, _ in GROUPS]


def expert_ops(ops):
    """The op of each chip's routed experts: the last of its MoE ops."""
    return {max(op for op in ops_of(ops, "moe", COMPUTE) if ops.op_src[op] == chip) for chip in set(ops.op_src)}


@pytest.mark.parametrize(("degrees", "ep_groups", "sharers"), GROUPS, ids=IDS)
def test_groups(degrees, ep_groups, sharers):
    """Dispatch and combine go to everyone in the EP group; gathering goes around the ranks that split an expert."""
    dep = deploy(model=ONE, **degrees)
    ops = build_structure(dep).ops
    waits, experts, flows = predecessors(ops), expert_ops(ops), ops_of(ops, "ep", FLOW)
    after = {op for op in flows if ancestors(waits, op) & experts}
    before = set(flows) - after

    def pairs(chosen):
        return sorted((int(ops.op_src[op]), int(ops.op_dst[op])) for op in chosen)

    expected = everyone(*ep_groups)
    if sharers is not None:
        size = len(sharers[0])
        expected = sorted(expected + (size - 1) * around(*sharers))
    assert pairs(before) == expected
    assert pairs(after) == expected


def test_the_bytes_of_a_message():
    """Rows are rounded up to whole tokens, equal for all ranks."""
    # dp 2, tp 2, ep 4, b 3, S 77: 231 tokens a replica, 462 in all, each to top-2 experts: 924 rows; an EP rank holds a
    # fourth, and sends a fourth of those to each: 924 / 16 = 57.75 -> 58 rows of 64 elements in bf16: 7424 bytes.
    dep = deploy(model=ONE, dp=2, tp=2, ep=4)
    structure = build_structure(dep)
    n_bytes = bytes_of_ops(structure, priced(dep, structure, 77, 3))
    assert Counter(n_bytes[op] for op in ops_of(structure.ops, "ep")) == {7424: 2 * 4 * 3}
    # cp 2 pads 77 to 80 and halves it: 3 * 40 = 120 tokens a rank, 2 * 120 * 2 / 16 = 30 rows: 3840 bytes.
    dep = deploy(model=ONE, dp=2, tp=2, cp=2, ep=4)
    structure = build_structure(dep)
    n_bytes = bytes_of_ops(structure, priced(dep, structure, 77, 3))
    assert Counter(n_bytes[op] for op in ops_of(structure.ops, "ep")) == {3840: 2 * 2 * 4 * 3}
    # A decode step of one sequence: 2 tokens, 4 rows over 16 pairs: one row each all the same.
    dep = deploy(model=ONE, dp=2, tp=2, ep=4, phase="decode")
    structure = build_structure(dep)
    n_bytes = bytes_of_ops(structure, priced(dep, structure, 77, 1))
    assert Counter(n_bytes[op] for op in ops_of(structure.ops, "ep")) == {64 * 2: 2 * 4 * 3}


def test_the_bytes_of_the_gathering():
    """moe_tp 4 over two replicas of tp 2: each rank contributes its half of its replica's tokens."""
    # b 3, S 77: 231 tokens, half of them 115.5 -> 116 tokens of 128 bytes; ring of 4: 3 sends a rank, both ways.
    # Dispatch between the 2 EP ranks: 4 * 231 * 2 / 4 = 462 rows of 128 bytes.
    dep = deploy(model=ONE, dp=4, tp=2, ep=2)
    structure = build_structure(dep)
    n_bytes = bytes_of_ops(structure, priced(dep, structure, 77, 3))
    assert Counter(n_bytes[op] for op in ops_of(structure.ops, "ep")) == {116 * 128: 2 * 8 * 3, 462 * 128: 2 * 8}


def test_the_formula_promises_the_rounded_figure():
    """DeepSeek-V3, dp 4, tp 2, ep 8, S 1000: 4 * 1000 * 8 / 64 = 500 rows; with 1001 tokens 500.5 -> 501."""
    fixed = {
        "phase": "prefill", "model": "deepseek-v3-671b", "chip": "h200-sxm", "topology": "flat-450", "n_chips": 8,
        "tp": 2, "cp": 1, "ep": 8,
    }  # fmt: skip
    for seq_len, rows in ((1000, 500), (1001, 501)):
        # 58 expert layers, 7 others, dispatch and combine, 7168 elements in bf16.
        assert one_point(**fixed, seq_len=seq_len)["ep_bytes"] == 58 * 2 * 7 * rows * 7168 * 2


def test_a_dense_model_has_no_expert_traffic():
    row = one_point(
        phase="decode", model="llama-3.1-8b", chip="h200-sxm", topology="flat-450", n_chips=4, tp=2, cp=1, ep=4,
        seq_len=1000,
    )  # fmt: skip
    assert row["ep"] is None
    assert row["ep_bytes"] is None


@pytest.mark.parametrize("model", [ONE, NO_SHARED], ids=lambda model: model.name)
def test_edges_of_dispatch_and_combine(model):
    """Router -> dispatch -> experts -> combine; the shared expert needs the router alone."""
    ops = build_structure(deploy(model=model, dp=4, ep=4)).ops
    waits = predecessors(ops)
    has_shared = model.moe.n_shared > 0
    moe = {chip: [op for op in ops_of(ops, "moe", COMPUTE) if ops.op_src[op] == chip] for chip in range(4)}
    flows = {step: {} for step in (0, 1)}
    for op in ops_of(ops, "ep", FLOW):
        flows[int(ops.op_step[op])][int(ops.op_src[op]), int(ops.op_dst[op])] = op
    (head,) = {len(v) for v in moe.values()}
    assert head == (3 if has_shared else 2)
    for chip in range(4):
        others = [other for other in range(4) if other != chip]
        router, experts = moe[chip][0], moe[chip][-1]
        expected = {router} | {flows[0][other, chip] for other in others}
        if has_shared:
            shared = moe[chip][1]
            assert waits[shared] == {router}
            expected.add(shared)
        assert waits[experts] == expected
        for other in others:
            assert waits[flows[0][chip, other]] == {router}
            assert waits[flows[1][chip, other]] == {experts}
        # tp 1: what comes next is the head, after the experts and everything that came back.
        (lm_head,) = [op for op in ops_of(ops, "lm_head") if ops.op_src[op] == chip]
        assert waits[lm_head] == {experts} | {flows[1][other, chip] for other in others}


@pytest.mark.parametrize("collective", ["ring", "direct"])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_no_edge_is_named_twice(collective, ep):
    """The arrays name each successor once, in every way of laying out experts."""
    named = edges(build_structure(deploy(model=ONE, dp=4, tp=2, ep=ep, collective=collective)).ops)
    assert len(named) == len(set(named))


def test_a_straggler_delays_those_who_wait_for_its_tokens():
    """dp 4, tp 2, ep 4: rank 2 (replica 1) routes 100 s late; its EP group 0, 2, 4, 6 waits, 1, 3, 5, 7 do not.

    Messages of 2 B at 1 B/s, three at once out of each chip: dispatch takes 6 s, the late rank's arrives at 106. Its
    own experts start at 100, when it has routed: the tokens of the others have been there since 6.
    """
    structure = build_structure(deploy(model=ONE, dp=4, tp=2, ep=4, topology=switch(1.0)))
    ops = structure.ops
    slow = len(structure.keys.durations)
    late = with_costs(ops, {min(op for op in ops_of(ops, "moe", COMPUTE) if ops.op_src[op] == 2): slow})
    start, _ = play(late, chosen_costs(structure, {}, {"ep_dispatch": 2}, more=(100,)))
    starts = {int(ops.op_src[op]): float(start[op]) for op in expert_ops(ops)}
    expected = dict.fromkeys([0, 4, 6], 106.0) | dict.fromkeys([1, 3, 5, 7], 6.0) | {2: 100.0}
    assert starts == {chip: pytest.approx(seconds, rel=1e-14) for chip, seconds in expected.items()}


def test_the_shared_expert_hides_the_dispatch():
    """6 s of dispatch beside 4 s of shared expert: 6; beside 9 s: 9. Without a shared expert nothing hides it."""
    structure = build_structure(deploy(model=ONE, dp=4, ep=4, topology=switch(1.0)))
    for shared, expected in ((4, 6.0), (9, 9.0)):
        costs = chosen_costs(structure, {"shared": shared}, {"ep_dispatch": 2})
        assert play(structure.ops, costs)[1].max() == pytest.approx(expected, rel=1e-14)


def test_in_decode_only_owners_hold_experts_tokens():
    """cp 2: chips 2, 3, 6, 7 (c = 1) attend only, so the experts are exchanged among chips 0, 1, 4, 5."""
    ops = build_structure(deploy(model=ONE, dp=2, tp=2, cp=2, ep=4, phase="decode")).ops
    assert flows_between(ops, "ep", step=0) == everyone([0, 1, 4, 5])
    assert {int(c) for c in ops.op_src[ops_of(ops, "moe", COMPUTE)]} == {0, 1, 4, 5}


@pytest.mark.parametrize(
    ("degrees", "complaint"),
    [
        ({"dp": 2, "tp": 2, "ep": 3}, "ep = 3"),  # dp * tp = 4
        ({"dp": 32, "ep": 32}, "16 experts"),
        ({"dp": 3, "tp": 2, "ep": 2}, "moe_tp"),  # moe_tp 3 lies across tp groups of 2
    ],
)
def test_what_cannot_be_laid_out_is_refused(degrees, complaint):
    with pytest.raises(InfeasibleError, match=complaint):
        deploy(model=ONE, **degrees)
