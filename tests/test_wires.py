"""Collectives as measured, and a topology's efficiency by size of message: durations by hand, bytes untouched."""

from __future__ import annotations

import math

import pytest

import g5cp_vec
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.grid import load_grid
from g5cp_vec.cost.calibration import surface_seconds
from g5cp_vec.errors import ConfigError
from g5cp_vec.runner.api import run_sweep

POINT = {
    "phase": "decode",
    "model": "llama-3.1-8b",
    "chip": "h200-sxm",
    "topology": "hgx-8",
    "n_chips": 8,
    "tp": 8,
    "cp": 1,
    "seq_len": 1024,
}
HIDDEN, N_ALL_REDUCES = 4096, 64
NCCL = 'name = "x"\ncollective_library = "nccl"\n'
ENGINE = NCCL + 'all_reduce_library = "trtllm"\nall_reduce_library_limit = 262144\n'


def runtime(tmp_path, text):
    path = tmp_path / "x.toml"
    path.write_text(text)
    return str(path)


def step_s(**keys):
    result = g5cp_vec.run({"fixed": {**POINT, **keys}})
    return result.tpot_s if keys.get("phase", "decode") == "decode" else result.ttft_s


def measured_s(library, n_bytes, group=8, op="all_reduce"):
    """The surface of a library at a size: straight from the chip file."""
    chip = load_chip("h200-sxm")
    for surface in chip.calibration.surface:
        if surface.kind == "collective" and surface.library.startswith(library) and dict(surface.labels)["op"] == op:
            return float(surface_seconds(chip, surface, (max(n_bytes, 512), group)))
    raise AssertionError(library)


def wires_s(collective, n_bytes, latency_s=2e-6, rate=450e9, group=8):
    chunk = math.ceil(n_bytes / group)
    if collective == "ring":
        return 2 * (group - 1) * (latency_s + chunk / rate)
    return 2 * (latency_s + (group - 1) * chunk / rate)


@pytest.mark.parametrize("path", ["g5", "math"])
@pytest.mark.parametrize("collective", ["ring", "direct"])
@pytest.mark.parametrize("batch", [1, 16, 4096])
def test_an_all_reduce_lasts_as_measured(tmp_path, path, collective, batch):
    """The layers' all-reduces are all that changes: 64 of them, however they are expanded."""
    keys = {"batch": batch, "collective": collective, "path": path}
    n_bytes = batch * HIDDEN * 2
    base_s = step_s(**keys, runtime="ideal") - N_ALL_REDUCES * wires_s(collective, n_bytes)
    with_nccl = step_s(**keys, runtime=runtime(tmp_path, NCCL))
    assert with_nccl - base_s == pytest.approx(N_ALL_REDUCES * measured_s("nccl", n_bytes), rel=1e-6)


@pytest.mark.parametrize(("batch", "library"), [(1, "trtllm"), (32, "trtllm"), (33, "nccl")])
def test_the_engine_takes_small_ones(tmp_path, batch, library):
    n_bytes = batch * HIDDEN * 2
    base_s = step_s(batch=batch, runtime="ideal") - N_ALL_REDUCES * wires_s("ring", n_bytes)
    mixed_s = step_s(batch=batch, runtime=runtime(tmp_path, ENGINE))
    assert mixed_s - base_s == pytest.approx(N_ALL_REDUCES * measured_s(library, n_bytes), rel=1e-6)


def test_bytes_stay_exact_and_audits_clean(tmp_path):
    grid = {"name": "x", "fixed": {**POINT, "runtime": runtime(tmp_path, ENGINE)}, "axes": {"batch": [1, 8, 4096]}}
    ideal = {"name": "x", "fixed": {**POINT, "runtime": "ideal"}, "axes": {"batch": [1, 8, 4096]}}
    rows, same = run_sweep(load_grid(grid), audit="all"), run_sweep(load_grid(ideal), audit="all")
    assert rows["tp_bytes"].to_list() == same["tp_bytes"].to_list()
    kpis = [name for name in rows.columns if name.startswith("lost_") or name.endswith("_violations")]
    assert len(kpis) == 6
    assert rows.select(kpis).sum().row(0) == (0,) * 6


def test_outside_of_a_switch_wires_count(tmp_path):
    """A group over two nodes, a mesh, and a chip without tables."""
    for keys in (
        {"n_chips": 16, "tp": 8, "rank_order": ["dp", "tp", "cp", "pp"]},
        {"topology": "mi300x-xgmi-8"},
        {"chip": "b300-sxm"},
    ):
        assert step_s(**keys, runtime=runtime(tmp_path, NCCL)) == step_s(**keys, runtime="ideal")


def test_half_the_link_doubles_what_grows(tmp_path):
    slow = tmp_path / "slow.toml"
    slow.write_text('name = "slow"\nkind = "switch"\nchip_bandwidth_gbytes_per_s = 225.0\nlatency_us = 2.0\n')
    batch, library = 4096, runtime(tmp_path, NCCL)
    n_bytes = batch * HIDDEN * 2
    grown_s = measured_s("nccl", n_bytes) - measured_s("nccl", 512)
    difference = step_s(batch=batch, topology=str(slow), runtime=library) - step_s(batch=batch, runtime=library)
    assert difference == pytest.approx(N_ALL_REDUCES * grown_s, rel=1e-6)


def test_experts_are_exchanged_as_measured(tmp_path):
    keys = {"model": "qwen3-235b-a22b", "dtype": "fp8", "ep": 8, "tp": 1, "dp": 8, "batch": 64}
    ideal, library = (g5cp_vec.run({"fixed": {**POINT, **keys, "runtime": name}})
                      for name in ("ideal", runtime(tmp_path, NCCL)))  # fmt: skip
    assert ideal.ep_bytes == library.ep_bytes
    message = ideal.ep_bytes // (94 * 2 * 7)
    wires = 2e-6 + 7 * message / 450e9
    expected = 94 * 2 * (measured_s("nccl", 8 * message, op="alltoall") - wires)
    assert library.tpot_s - ideal.tpot_s == pytest.approx(expected, rel=1e-6)


SWITCH = 'name = "s"\nkind = "switch"\nchip_bandwidth_gbytes_per_s = 450.0\nlatency_us = 2.0\n'
TABLE = "[[efficiency]]\nbytes = 1024\nfraction = 0.25\n[[efficiency]]\nbytes = 1048576\nfraction = 0.75\n"


@pytest.mark.parametrize(("batch", "fraction"), [(1, 0.25), (32, 0.5), (8192, 0.75)])
@pytest.mark.parametrize("path", ["g5", "math"])
def test_efficiency_by_size(tmp_path, batch, fraction, path):
    """Messages of a ring of eight have batch * 1 KB: half-way between 1 KB and 1 MB in logarithms is 32 KB."""
    plain, sized = tmp_path / "plain.toml", tmp_path / "sized.toml"
    plain.write_text(SWITCH)
    sized.write_text(SWITCH + TABLE)
    keys = {"batch": batch, "path": path}
    difference = step_s(**keys, topology=str(sized)) - step_s(**keys, topology=str(plain))
    message_s = batch * HIDDEN * 2 / 8 / 450e9
    assert difference == pytest.approx(N_ALL_REDUCES * 14 * message_s * (1 / fraction - 1), rel=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SWITCH + "protocol_efficiency = 0.9\n" + TABLE,
            "efficiency: expected either this table or",
        ),
        (SWITCH + TABLE + "[[efficiency]]\nbytes = 2048\nfraction = 0.5\n", "efficiency: expected rising bytes"),
        (SWITCH + "[[efficiency]]\nbytes = 2048\nfraction = 1.5\n", "efficiency"),
    ],
)
def test_hostile_tables(tmp_path, text, message):
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        step_s(topology=str(path))
