"""What is worked out for many points, parts or deployments at once equals what each takes alone, bit for bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_acceptance_tools import DENSE, EXPERTS, GQA, MLA, deploy, small_model, sweep_rows

import g5cp_vec
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.model import load_model
from g5cp_vec.cost.calibration import SHAPES_AT_ONCE, price_part, price_parts
from g5cp_vec.cost.rows import cost_rows, fixed_rows, parts_by_key, price_computes
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import LONGEST_CONTEXT, MOST_BYTES, MOST_SEQUENCES, MemoryModel
from g5cp_vec.mapping.structure import build_structure
from g5cp_vec.runner import local, results
from g5cp_vec.runner.memo import Memo
from g5cp_vec.runner.passes import distinct

CHIPS = {name: load_chip(name) for name in ("h100-sxm", "h200-sxm", "b200-sxm", "mi300x")}
MODELS = {name: load_model(name) for name in ("deepseek-v3-671b", "llama-3.1-8b", "qwen3-235b-a22b", "gpt-oss-120b")}


def loads(dep, points):
    seq_len, batch = (np.array(column, np.int64) for column in zip(*points, strict=True))
    return build_load(dep, seq_len, batch, 0 * seq_len)


deployments = st.builds(
    lambda chip, model, phase, cp, kv_dtype: deploy(
        chip=CHIPS[chip], model=MODELS[model], phase=phase, cp=cp, tp=4, ep=4, kv_dtype=kv_dtype
    ),
    st.sampled_from(sorted(CHIPS)),
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(["prefill", "decode"]),
    st.sampled_from([1, 4]),
    st.sampled_from(["bf16", "fp8"]),
)
points = st.lists(st.tuples(st.integers(1, 2**22), st.integers(1, 64)), min_size=1, max_size=4)


# --- Prices -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(deployments, points)
def test_a_part_costs_the_same_in_any_company(dep, chosen):
    """All parts of all points in one go, against part by part and point by point."""
    together = parts_by_key(dep, loads(dep, chosen))
    asked = dep.chip, dep.model.hidden
    price_parts(*asked, [part for parts in together.values() for part in parts])
    for i, point in enumerate(chosen):
        alone = parts_by_key(dep, loads(dep, [point]))
        for key, parts in together.items():
            for one_of_many, by_itself in zip(parts, alone[key], strict=True):
                many, one = price_part(*asked, one_of_many), price_part(*asked, by_itself)
                assert (many is None) == (one is None)
                if many is not None:
                    n = len(chosen)
                    assert np.broadcast_to(many.seconds, n)[i] == np.broadcast_to(one.seconds, 1)[0], key
                    assert np.broadcast_to(many.extrapolated, n)[i] == np.broadcast_to(one.extrapolated, 1)[0], key


def test_more_shapes_than_are_priced_at_once():
    dep = deploy(chip=CHIPS["h100-sxm"], model=MODELS["llama-3.1-8b"], tp=4)
    lengths = np.arange(1, 2 * SHAPES_AT_ONCE, dtype=np.int64)
    many = parts_by_key(dep, build_load(dep, lengths, 0 * lengths + 1, 0 * lengths))["qkv", 0]
    few = parts_by_key(dep, build_load(dep, lengths[-9:], 0 * lengths[-9:] + 1, 0 * lengths[-9:]))["qkv", 0]
    for a, b in zip(many, few, strict=True):
        prices = [price_part(dep.chip, dep.model.hidden, part) for part in (a, b)]
        np.testing.assert_array_equal(prices[0].seconds[-9:], prices[1].seconds)


@settings(max_examples=20)
@given(st.lists(st.tuples(deployments, points), min_size=1, max_size=4))
def test_deployments_are_priced_together_as_one_by_one(cases):
    """Those of one structure: here that of the first one's phase, cp and model."""
    first = cases[0][0]
    alike = [
        (dataclasses.replace(first, chip=dep.chip, kv_dtype=dep.kv_dtype), chosen) for dep, chosen in cases
    ]  # fmt: skip
    structure = build_structure(first)
    asked = [(dep, loads(dep, chosen), len(chosen)) for dep, chosen in alike]
    for (dep, load, n), computes in zip(asked, price_computes(structure.keys, asked), strict=True):
        known, anew = (cost_rows(dep, structure.keys, structure.network, load, n, c) for c in (computes, None))
        for name in known._fields:
            np.testing.assert_array_equal(getattr(known, name), getattr(anew, name))
        fixed, fixed_anew = (fixed_rows(dep, structure.keys, load, n, c) for c in (computes, None))
        np.testing.assert_array_equal(fixed, fixed_anew)


# --- Memory -----------------------------------------------------------------------------------------------------------

WINDOWS = small_model(attention=GQA.model_copy(update={"window": 100}), n_layers=3)
HELD = {
    "dense": DENSE,
    "latents": small_model(attention=MLA, n_layers=5, moe=EXPERTS, first_dense=2),
    "windows": WINDOWS,
}


def with_room(dep, n_bytes):
    chip = dep.chip.model_copy(update={"hbm_bytes": int(n_bytes), "usable_memory_fraction": 1.0})
    return dataclasses.replace(dep, chip=chip)


def peak_by_hand(model, length, batch, cached, chunk):
    """The fullest of all passes of one point, one after another, in unbounded integers."""
    if model.dep.phase == "decode" or chunk == 0:
        return model.at(length, batch, cached).peak_bytes
    ends = [*range(cached + chunk, length, chunk), length]
    return max(
        model.at(end, batch, begin).peak_bytes for begin, end in zip([cached, *ends[:-1]], ends, strict=True)
    )  # fmt: skip


def longest_by_hand(model, batch, cached, chunk):
    """Halve what is left, one length at a time."""
    low = cached + 1 if model.dep.phase == "prefill" else 1
    if peak_by_hand(model, low, batch, cached, chunk) > model.usable_bytes:
        return 0
    high = low + 3000
    while high - low > 1:
        middle = (low + high) // 2
        fits = peak_by_hand(model, middle, batch, cached, chunk) <= model.usable_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low


@settings(max_examples=100)
@given(
    st.sampled_from(sorted(HELD)),
    st.sampled_from(["prefill", "decode"]),
    st.sampled_from([1, 2, 5]),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40), st.sampled_from([0, 0, 7, 64])), min_size=1, max_size=5),
    st.integers(1, 1500),
    st.integers(-1, 1),
)
def test_longest_contexts_of_many_loads(name, phase, cp, chosen, length, more):
    dep = deploy(model=HELD[name], phase=phase, cp=cp, ep=1)
    if phase == "decode" or (name == "windows" and cp > 1):
        chosen = [(batch, 0 if phase == "decode" else cached, 0) for batch, cached, _ in chosen]
    room = MemoryModel(dep).at(length + chosen[0][1], *chosen[0][:2]).peak_bytes
    model = MemoryModel(with_room(dep, room + more))
    found = model.max_seq_len(*(np.array(column, np.int64) for column in zip(*chosen, strict=True)))
    for load, longest in zip(chosen, found.tolist(), strict=True):
        assert longest == model.max_seq_len(*load)
        expected = longest_by_hand(model, *load)
        grows = expected < load[1] + 3000  # windows everywhere: nothing grows any more
        assert longest == expected if grows else longest >= expected


@pytest.mark.parametrize("name", sorted(HELD))
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_longest_context_of_an_enormous_memory(name, phase):
    """Beyond what is counted in 64 bits, as just below."""
    dep = deploy(model=HELD[name], phase=phase)
    batch = 2**20
    for room in (MOST_BYTES, MOST_BYTES + 1, 10**18):
        model = MemoryModel(with_room(dep, room))
        longest = model.max_seq_len(batch, 0)
        assert longest == LONGEST_CONTEXT or model.at(longest + 1, batch, 0).peak_bytes > room
        assert model.at(longest, batch, 0).peak_bytes <= room
        assert model.max_seq_len(np.array([batch, 1]), np.array([0, 0])).tolist() == [
            longest, model.max_seq_len(1, 0),
        ]  # fmt: skip


@settings(max_examples=100)
@given(
    st.sampled_from(sorted(HELD)),
    st.sampled_from(["prefill", "decode"]),
    st.sampled_from([1, 3]),
    st.lists(st.integers(1, 2**30), min_size=1, max_size=5),
    st.integers(1, 3000),
    st.integers(-1, 1),
    st.sampled_from(["pass_q", "pass_q_ring"]),
)
def test_most_sequences_by_halving(name, phase, cp, lengths, n, more, form):
    dep = deploy(
        model=HELD[name],
        phase=phase,
        cp=cp,
        ep=1,
        decode_form=None if name == "windows" or phase == "prefill" else form,
    )
    model = MemoryModel(with_room(dep, MemoryModel(dep).at(lengths[0] % 5000 + 1, n, 0).peak_bytes + more))
    lengths = [lengths[0] % 5000 + 1, *lengths]
    found = model.max_sequences(np.array(lengths), np.zeros(len(lengths), np.int64))
    for seq_len, most in zip(lengths, found.tolist(), strict=True):
        low, high = 0, min(dep.most_tokens // (dep.dp * seq_len), MOST_SEQUENCES) + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = model.at(seq_len, middle, 0).peak_bytes <= model.usable_bytes
            low, high = (middle, high) if fits else (low, middle)
        assert most == low


# --- Rows -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(*[st.integers(-3, 3) | st.sampled_from([0, 2**60])] * 3), min_size=1, max_size=30))
def test_distinct_rows(rows):
    columns, which = distinct([np.array(column, np.int64) for column in zip(*rows, strict=True)])
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert len(set(found)) == len(found) == len(set(rows))
    assert [found[i] for i in which.tolist()] == rows


def splitmix(x):
    """As published, in unbounded integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 2**20)), min_size=1))
def test_ids_of_points(rows):
    digests, *columns = zip(*rows, strict=True)
    found = results.point_ids(np.array(digests, np.uint64), tuple(np.array(c, np.int64) for c in columns))
    for text, (state, *values) in zip(found, rows, strict=True):
        for value in values:
            state = splitmix(state ^ splitmix(value))
        assert text == f"{state:016x}"


# --- Deployments that differ in the network only ----------------------------------------------------------------------


def test_the_oldest_are_forgotten():
    memo = Memo(10)
    memo.keep("a", 1, 4)
    memo.keep("b", 2, 4)
    assert memo.get("a") == 1
    memo.keep("c", 3, 4)  # "b" was asked for longest ago
    assert [memo.get(key) for key in "abc"] == [1, None, 3]
    memo.keep("a", 5, 7)  # takes the place of the first, and of "c"
    assert [memo.get(key) for key in "abc"] == [5, None, None]
    memo.keep("d", 6, 11)  # larger than the room
    assert [memo.get(key) for key in "ad"] == [None, None]
    memo.keep("e", 7, 10)
    assert memo.get("e") == 7


GRID = {
    "name": "alike",
    "fixed": {"n_chips": 16, "cp": 2, "tp": 4, "chip": "h100-sxm", "runtime": "vllm"},
    "axes": {
        "model": ["llama-3.1-8b", "gpt-oss-120b"],
        "phase": ["prefill", "decode"],
        "topology": ["hgx-8", "flat-450"],
        "collective": ["ring", "direct", "best"],
        "rank_order": [["tp", "cp", "pp", "dp"], ["cp", "tp", "pp", "dp"]],
        "path": ["g5"],
        "batch": [1, 3],
        "seq_len": [5000, 2**17],
    },
}


def test_what_is_remembered_is_what_would_be_found(monkeypatch):
    with_memory = g5cp_vec.sweep(GRID, audit="none")
    monkeypatch.setattr(local, "ROWS_REMEMBERED", 0)
    without = g5cp_vec.sweep(GRID, audit="none")
    assert with_memory.equals(without)
    assert not with_memory["step_s"].is_null().any()
    # The network does matter: there are 16 loads of models.
    assert with_memory["step_s"].n_unique() > 16


def test_nothing_else_is_taken_for_the_network():
    """Every other key may change what a rank computes or holds, so it tells deployments apart."""
    left_out = {field.name for field in dataclasses.fields(deploy())} - set(local.ALIKE_FIELDS)
    assert left_out == {"topology", "collective", "rank_order"}


def test_two_threads_remember_what_one_does():
    assert g5cp_vec.sweep(GRID, audit="none", jobs=2).equals(g5cp_vec.sweep(GRID, audit="none", jobs=1))


def test_the_faster_collective_is_priced_as_itself():
    """Measured collectives price a ring's steps by the ring."""
    fixed = {
        "model": "llama-3.1-8b", "chip": "h200-sxm", "topology": "hgx-8", "cp": 1, "tp": 8, "n_chips": 8,
        "runtime": "vllm",
    }  # fmt: skip
    axes = {"phase": ["decode", "prefill"], "seq_len": [8192, 2**17], "batch": [1, 8]}
    rows = {name: sweep_rows(fixed | {"collective": name}, **axes) for name in ("ring", "direct", "best")}
    chosen = set()
    for ring, direct, best in zip(rows["ring"], rows["direct"], rows["best"], strict=True):
        faster = ring if ring["step_s"] <= direct["step_s"] else direct
        assert (best["step_s"], best["chosen_collective"]) == (faster["step_s"], f"tp={faster['collective']}")
        chosen.add(best["chosen_collective"])
    assert "tp=ring" in chosen


def test_a_point_is_the_same_in_a_sweep_and_alone():
    fixed = {"model": "llama-3.1-8b", "chip": "h100-sxm", "topology": "hgx-8", "cp": 2, "tp": 4, "n_chips": 8}
    axes = {"phase": ["prefill", "decode"], "seq_len": [1000, 100_000, 10**6], "batch": [1, 2]}
    for row in sweep_rows(fixed, **axes):
        keys = {key: row[key] for key in ("phase", "seq_len", "batch")}
        (alone,) = sweep_rows(fixed, **{key: [value] for key, value in keys.items()})
        assert {k: v for k, v in alone.items() if k != "row"} == {k: v for k, v in row.items() if k != "row"}
