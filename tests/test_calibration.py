"""Calibrated durations: interpolation against a slow twin, bounds, monotony, parts of a simulation."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import g5cp_vec
from g5cp_vec.config.calibration import AXES
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.deployment import build_deployment
from g5cp_vec.config.model import load_model
from g5cp_vec.config.topology import load_topology
from g5cp_vec.cost.calibration import (
    WORK,
    bound_seconds,
    extrapolation,
    peak_times,
    place_part,
    price_part,
    surface_seconds,
)
from g5cp_vec.cost.flops import layer_parts
from g5cp_vec.cost.parts import AttentionShape, GemmShape, Part
from g5cp_vec.cost.rows import coverage, parts_by_key
from g5cp_vec.mapping.load import build_load

CALIBRATED = ["h100-sxm", "h200-sxm", "b200-sxm"]
SURFACES = [(name, surface) for name in CALIBRATED for surface in load_chip(name).calibration.surface]
H100 = load_chip("h100-sxm")
GEMM_H100 = H100.calibration.defaults["gemm", "bf16"]


# --- The slow twin: one point at a time, straight from the definition -------------------------------------------------


def naive_interpolation(axes, durations, point):
    """ln t is linear in ln x along each axis in turn."""

    def along(axis, offset):
        if axis == len(axes):
            return math.log(durations[offset])
        nodes, x = axes[axis], point[axis]
        if x <= nodes[0] or len(nodes) == 1:
            return along(axis + 1, offset * len(nodes))
        if x >= nodes[-1]:
            return along(axis + 1, offset * len(nodes) + len(nodes) - 1)
        right = next(i for i, node in enumerate(nodes) if node > x)
        low, high = nodes[right - 1], nodes[right]
        share = math.log(x / low) / math.log(high / low)
        below = along(axis + 1, offset * len(nodes) + right - 1)
        above = along(axis + 1, offset * len(nodes) + right)
        return below + share * (above - below)

    return math.exp(along(0, 0))


def naive_seconds(chip, surface, point):
    axes = [nodes for _, nodes in surface.axes]
    inside = [min(max(x, nodes[0]), nodes[-1]) for x, nodes in zip(point, axes, strict=True)]
    seconds = naive_interpolation(axes, surface.duration_s, inside)
    constants = dict(surface.constants)
    link = constants.get("link_gigabytes_per_second")
    bandwidth = chip.hbm_bandwidth_bytes_per_s if link is None else link * 1e9

    def form(at):
        flops, n = WORK[surface.kind](constants, *at)
        a = flops / chip.peak(surface.arithmetic_dtype) / surface.arithmetic_efficiency
        b = n / bandwidth / surface.memory_efficiency
        return surface.overhead_s + (a**3 + b**3) ** (1 / 3)

    return seconds * form(point) / form(inside)


def points_of(surface):
    """Coordinates up to 64 times outside the nodes; there is no shape with less than one token."""
    axes = []
    for name, nodes in surface.axes:
        low = {"group": 2.0, "new_tokens": 1.0}.get(name, nodes[0] / 64)
        axes.append(st.floats(math.log(low), math.log(nodes[-1] * 64)).map(math.exp) | st.sampled_from(nodes))
    return st.tuples(*axes)


cases = st.sampled_from(SURFACES).flatmap(
    lambda case: st.tuples(st.just(case), st.lists(points_of(case[1]), min_size=1))
)


@given(cases)
def test_surfaces_equal_the_twin_and_stay_above_the_roofline(case):
    (name, surface), points = case
    chip = load_chip(name)
    coordinates = [np.array(column) for column in zip(*points, strict=True)]
    seconds = surface_seconds(chip, surface, coordinates)
    bound = bound_seconds(surface, *peak_times(chip, surface, coordinates), coordinates)
    assert (seconds >= bound).all()
    expected = [naive_seconds(chip, surface, point) for point in points]
    np.testing.assert_allclose(seconds, np.maximum(expected, bound), rtol=1e-9)


@given(cases, st.floats(1.0, 64.0))
def test_longer_takes_no_less(case, factor):
    (name, surface), points = case
    lengths = [i for i, axis in enumerate(AXES[surface.kind]) if axis in ("length", "context")]
    for axis in lengths:
        short = [np.array(column) for column in zip(*points, strict=True)]
        long = [column * factor if i == axis else column for i, column in enumerate(short)]
        before, after = (surface_seconds(load_chip(name), surface, at) for at in (short, long))
        assert (after >= before * (1 - 1e-12)).all()


@pytest.mark.parametrize("name", CALIBRATED)
def test_nodes_are_reproduced(name):
    chip = load_chip(name)
    for surface in chip.calibration.surface:
        nodes = np.array(list(itertools.product(*(nodes for _, nodes in surface.axes)))).T
        bound = bound_seconds(surface, *peak_times(chip, surface, nodes), nodes)
        np.testing.assert_allclose(
            surface_seconds(chip, surface, nodes), np.maximum(surface.duration_s, bound), rtol=1e-12
        )
        assert (extrapolation(surface, nodes) == 1).all()


PREFILLS = [case for case in SURFACES if case[1].kind.endswith("_prefill")]


@pytest.mark.parametrize(("name", "surface"), PREFILLS)
def test_efficiency_settles_beyond_the_table(name, surface):
    """Up to a million tokens it grows a little, as the overhead fades, and never falls."""
    chip = load_chip(name)
    length = np.array([surface.limits[0][1], 2**16, 2**18, 2**20], float)
    seconds = surface_seconds(chip, surface, (length, 32.0))
    efficiency = peak_times(chip, surface, (length, 32.0))[0] / seconds
    assert (np.diff(efficiency) >= -1e-12).all()
    assert efficiency[-1] <= min(1.0, 1.25 * efficiency[0])
    np.testing.assert_allclose(extrapolation(surface, (length, 32.0)), length / length[0])


# --- Parts of a simulation -------------------------------------------------------------------------------------------


def prefill_part(q, kv, pairs, heads=32, batch=1):
    shape = AttentionShape("prefill", batch, q, kv, pairs, heads, heads // 8, 128, 128, False, "bf16")
    flops = 4 * batch * heads * 128 * pairs
    return Part("attention", "attention", flops, 4 * batch * heads * 128 * (q + kv), "bf16", shape)


def test_a_causal_square_is_where_it_was_measured():
    place = place_part(H100.calibration, 4096, prefill_part(8192, 8192, 8192 * 8192 / 2))
    assert place.coordinates == (8192, 32)


@given(st.integers(1, 2**17), st.integers(1, 2**20), st.floats(0.01, 1.0), st.integers(1, 8))
def test_a_rectangle_keeps_its_rows_and_its_flops(q, kv, kept, batch):
    pairs = max(q, q * kv * kept)  # a row attends itself
    part = prefill_part(q, kv, pairs, batch=batch)
    place = place_part(H100.calibration, 4096, part)
    length, heads = place.coordinates
    assert length * heads == pytest.approx(batch * 32 * q)
    flops, _ = WORK["attention_prefill"](place.surface.numbers, length, heads)
    assert flops == pytest.approx(part.flops)
    assert price_part(H100, 4096, part).seconds >= part.flops / H100.peak("bf16")


def test_a_launch_costs_what_it_costs_at_any_head_width():
    """Heads of half the width: half the time where it is long, a launch and half the traffic where it is short."""
    long, short = [
        [decode_seconds(kv_tokens, batch, width) for width in (64, 128, 256)]
        for kv_tokens, batch in ((131072, 64), (1024, 1))
    ]
    assert long[0] / long[1] == pytest.approx(0.5, rel=0.01)
    assert long[2] / long[1] == pytest.approx(2, rel=0.01)
    surface = H100.calibration.defaults["attention_decode", "bf16"]
    traffic_s = 2 * 2 * 1024 * 8 * 128 / H100.hbm_bandwidth_bytes_per_s / surface.memory_efficiency
    for ratio, width in ((short[0] / short[1], 64), (short[2] / short[1], 256)):
        expected = (surface.overhead_s + traffic_s * width / 128) / (surface.overhead_s + traffic_s)
        assert ratio == pytest.approx(expected, rel=1e-3)


def decode_seconds(kv_tokens, batch, width):
    elements = 2 * batch * kv_tokens * 8 * width
    shape = AttentionShape("decode", batch, 1, kv_tokens, kv_tokens, 64, 8, width, width, False, "bf16")
    return float(
        price_part(H100, 4096, Part("attention", "attention", 16 * elements, 2 * elements, "bf16", shape)).seconds
    )


def test_a_gemm_is_its_node():
    for m, n, k in [(2048, 4096, 4096), (1, 10240, 8192)]:
        part = Part("qkv", "gemm", 2 * m * n * k, 2 * (m * k + n * k + m * n), "bf16", GemmShape(m, k, n))
        node = dict(zip(itertools.product(*(nodes for _, nodes in GEMM_H100.axes)), GEMM_H100.duration_s, strict=True))
        assert price_part(H100, 4096, part).seconds == pytest.approx(node[m, n, k], rel=1e-12)


def deploy(model="deepseek-v3-671b", **keys):
    fixed = {
        "chip": H100,
        "topology": load_topology("hgx-8"),
        "phase": "prefill",
        "n_chips": 8,
        "tp": 8,
        "cp": 1,
        "ep": 8,
    }
    return build_deployment({**fixed, "model": load_model(model), **keys})


def test_experts_are_priced_as_they_were_measured():
    """tp 1, ep 1, all 256 experts: gate, activation and down of 4096 tokens are the measured network's three parts."""
    dep = deploy(n_chips=1, tp=1, ep=1)
    load = build_load(dep, 4096, 1, 0)
    kind = next(kind for kind in dep.model.kinds[0] if kind.ffn == "moe")
    parts = layer_parts(dep, load, kind)["experts"]
    surface = H100.calibration.defaults["moe", "fp8"]
    seconds = sum(price_part(H100, dep.model.hidden, part).seconds for part in parts if part.shape is not None)
    measured = surface_seconds(H100, surface, (4096 * 8 / 256, 256.0, 2048.0))
    assert seconds == pytest.approx(float(measured), rel=1e-9)


def test_experts_as_wide_as_the_hidden_state_keep_their_width():
    """gpt-oss: hidden 2880, experts of 2880; gate and up are (2880, 5760), down is (2880, 2880)."""
    chip = load_chip("b200-sxm")
    model = str(Path(__file__).parent / "data" / "configs" / "gpt-oss-20b.json")
    for tp, width in ((1, 2880), (2, 1440)):
        dep = deploy(model, chip=chip, dp=1, n_chips=tp, tp=tp, ep=1)
        parts = layer_parts(dep, build_load(dep, 4096, 1, 0), dep.model.kinds[0][0])["experts"]
        places = [place_part(chip.calibration, 2880, part) for part in parts if part.shape is not None]
        assert [place.coordinates[2] for place in places] == [width, width]
        assert sum(place.share for place in places) == pytest.approx(1, rel=1e-12)
        assert [place.work for place in places] == pytest.approx([2880 / 7168] * 2, rel=1e-12)


def test_what_was_not_measured_is_said():
    point = {
        "model": "qwen3-235b-a22b", "chip": "h100-sxm", "topology": "hgx-8", "n_chips": 8, "tp": 8, "ep": 8, "cp": 1,
        "phase": "prefill", "seq_len": 8192, "dtype": "bf16",
    }  # fmt: skip
    row = g5cp_vec.run({"fixed": point})
    assert (row.calibrated, row.uncalibrated_parts) == (False, "experts")
    assert row.extrapolated >= 1
    row = g5cp_vec.run({"fixed": {**point, "model": "deepseek-v3-671b", "dtype": "fp8"}})
    assert (row.calibrated, row.uncalibrated_parts) == (True, None)
    row = g5cp_vec.run({"fixed": {**point, "chip": "sg2262"}})
    assert (row.calibrated, row.uncalibrated_parts, row.extrapolated) == (False, None, None)


def test_extrapolation_is_the_largest_ratio():
    dep = deploy("llama-3.1-8b", n_chips=1, tp=1)
    load = build_load(dep, np.array([2**14, 2**20]), np.ones(2, np.int64), np.zeros(2, np.int64))
    covered = coverage(dep, load, 2)
    assert covered.uncalibrated == ()
    # A million tokens: 64 times the longest prefill, 32 times the most rows of a GEMM.
    np.testing.assert_allclose(covered.extrapolated[1], 64)
    assert covered.extrapolated[0] < 2


def test_pricing_does_not_depend_on_company():
    dep = deploy()
    seq_len = np.array([8192, 2**17, 2**20])
    many = parts_by_key(dep, build_load(dep, seq_len, np.ones(3, np.int64), np.zeros(3, np.int64)))
    for i, length in enumerate(seq_len):
        one = parts_by_key(dep, build_load(dep, int(length), 1, 0))
        for key, parts in many.items():
            for together, alone in zip(parts, one[key], strict=True):
                a, b = (price_part(H100, dep.model.hidden, part) for part in (together, alone))
                assert np.broadcast_to(a.seconds, 3)[i] == pytest.approx(float(b.seconds), rel=1e-12)
