"""Pipeline stages: who holds which layers, what goes between them, and that times span the whole chain."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from test_acceptance_tools import (
    EXPERTS,
    bytes_of_ops,
    chosen_costs,
    deploy,
    flows_between,
    one_point,
    ops_of,
    play,
    predecessors,
    priced,
    small_model,
    sweep_rows,
)

from g5cp_vec.engine.arrays import COMPUTE, FLOW
from g5cp_vec.mapping.structure import build_structure, stage_layers


@pytest.mark.parametrize(
    ("n_layers", "pp", "held"),
    [
        (61, 4, [16, 15, 15, 15]),  # 61 = 4 * 15 + 1
        (94, 4, [24, 24, 23, 23]),
        (7, 3, [3, 2, 2]),
        (8, 8, [1] * 8),
        (5, 1, [5]),
        (126, 16, [8] * 14 + [7] * 2),  # 126 = 16 * 7 + 14
    ],
)
def test_the_first_stages_hold_one_layer_more(n_layers, pp, held):
    stages = stage_layers(n_layers, pp)
    assert [len(stage) for stage in stages] == held
    assert [layer for stage in stages for layer in stage] == list(range(n_layers))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_layer_runs_on_the_chips_of_its_stage(phase):
    """7 layers, pp 3, tp 2, cp 2 in the default order: stage p is chips 4 p to 4 p + 3."""
    ops = build_structure(deploy(phase=phase, model=small_model(n_layers=7), pp=3, tp=2, cp=2)).ops
    stage_of_layer = [0, 0, 0, 1, 1, 2, 2]
    for op in ops_of(ops, "attention", COMPUTE):
        assert ops.op_src[op] // 4 == stage_of_layer[ops.op_layer[op]]
    layers = Counter(int(layer) for layer in ops.op_layer[ops_of(ops, "qkv", COMPUTE)])
    assert layers == dict.fromkeys(range(7), 4 if phase == "prefill" else 2)
    # Embedding on the first stage and head on the last, on every rank that holds tokens: in decode the owners.
    embed, head = ops_of(ops, "embed"), ops_of(ops, "lm_head")
    assert [int(c) for c in ops.op_src[embed]] == ([0, 1, 2, 3] if phase == "prefill" else [0, 1])
    assert [int(c) for c in ops.op_src[head]] == ([8, 9, 10, 11] if phase == "prefill" else [8, 9])


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_transfers_join_equal_coordinates(phase):
    """dp 2, tp 2, cp 2, pp 2: chip = t + 2 c + 4 p + 8 d sends to the chip 4 above; in decode only owners (c = 0)."""
    dep = deploy(phase=phase, pp=2, tp=2, cp=2, dp=2)
    structure = build_structure(dep)
    senders = [0, 1, 2, 3, 8, 9, 10, 11] if phase == "prefill" else [0, 1, 8, 9]
    assert flows_between(structure.ops, "pp") == [(chip, chip + 4) for chip in senders]
    n_bytes = bytes_of_ops(structure, priced(dep, structure, 1000, 3))
    # b * S / cp tokens (500 each) of 64 elements in bf16; one token per sequence in decode.
    expected = 3 * (500 if phase == "prefill" else 1) * 64 * 2
    assert {n_bytes[op] for op in ops_of(structure.ops, "pp")} == {expected}


def test_a_transfer_waits_for_the_layer_and_the_next_stage_for_the_transfer():
    for tp in (1, 2):
        ops = build_structure(deploy(model=small_model(n_layers=3), pp=3, tp=tp)).ops
        waits = predecessors(ops)
        transfers = ops_of(ops, "pp", FLOW)
        assert len(transfers) == 2 * tp
        for op in transfers:
            ended = waits[op]
            # The last thing the stage delivers to this chip: its FFN, or what came in last of the all-reduce.
            assert {str(ops.op_reason[e]) for e in ended} == {str(ops.op_reason[max(ended)])}
            assert all(ops.op_dst[e] == ops.op_src[op] for e in ended)
            (qkv,) = [after for after, before in waits.items() if op in before]
            assert waits[qkv] == {op}
            assert ops.op_src[qkv] == ops.op_dst[op]


def test_times_span_the_chain():
    """7 layers of 3 s of FFN, 2 transfers of 5 s: 31 s whatever the stages; one stage pays no transfer."""
    for pp, expected in ((1, 21.0), (2, 26.0), (3, 31.0), (7, 51.0)):
        structure = build_structure(deploy(model=small_model(n_layers=7), pp=pp))
        costs = chosen_costs(structure, {"ffn": 3}, {"pp": 5} if pp > 1 else {})
        assert play(structure.ops, costs)[1].max() == expected


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_pp_in_the_result(phase):
    """More stages cost their transfers and nothing else; the head's stage reports."""
    fixed = {"model": "llama-3.1-8b", "chip": "h200-sxm", "topology": "flat-450", "cp": 1, "seq_len": 50_000}
    one = one_point(**fixed, phase=phase, n_chips=1)
    for pp in (2, 4):
        row = one_point(**fixed, phase=phase, n_chips=pp, pp=pp)
        message = (50_000 if phase == "prefill" else 1) * 4096 * 2
        assert row["pp_bytes"] == message
        transfers = (pp - 1) * (2e-6 + message / 450e9)
        assert row["step_s"] == pytest.approx(one["step_s"] + transfers, rel=1e-12)
        assert row["compute_s"] < one["compute_s"]
        assert row["comm_s"] == pytest.approx(transfers / (pp - 1), rel=1e-9)
    assert one["pp_bytes"] is None


def test_stages_of_unequal_kinds():
    """Three dense and two expert layers over two stages: both kinds on the first, experts alone on the second."""
    model = small_model(n_layers=5, moe=EXPERTS, first_dense=2)
    ops = build_structure(deploy(model=model, pp=2, tp=2, ep=2)).ops
    dense = {int(layer) for layer in ops.op_layer[ops_of(ops, "ffn")]}
    experts = {int(layer) for layer in ops.op_layer[ops_of(ops, "moe")]}
    assert (dense, experts) == ({0, 1}, {2, 3, 4})
    assert {int(c) for c in ops.op_src[ops_of(ops, "moe")]} == {0, 1, 2, 3}


def test_memory_of_stages_is_the_fullest():
    """The head alone outweighs the embedding's stage only where layers are equal: see the memory tests for bytes."""
    rows = sweep_rows(
        {"phase": "prefill", "model": "llama-3.1-405b", "chip": "h200-sxm", "topology": "flat-450", "n_chips": 32,
         "tp": 8, "cp": 1, "seq_len": "8K"},
        pp=[1, 2, 4],
    )  # fmt: skip
    weights = [row["weight_bytes"] for row in rows]
    assert weights == sorted(weights, reverse=True)
    assert np.isclose(weights[0] / weights[1], 2, rtol=0.05)
