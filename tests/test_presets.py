"""Every preset of chips and topologies: it is listed, it says where each number comes from, and it runs."""

from __future__ import annotations

import json
import math
import re

import pytest
from click.testing import CliRunner

import g5cp_vec
from g5cp_vec.cli import main
from g5cp_vec.config._files import locate, preset_names
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.topology import load_topology
from g5cp_vec.mapping.network import build_network

CHIPS, TOPOLOGIES = preset_names("chips"), preset_names("topologies")


def test_those_there_are():
    assert set(CHIPS) >= {
        "a100-sxm", "ascend-910b", "ascend-910c", "b200-sxm", "b300-sxm", "gb200", "gb300", "h100-96gb-500w",
        "h100-sxm", "h200-sxm", "mi300x", "mi355x", "sg2262", "tpu-v5p", "tpu-v6e",
    }  # fmt: skip
    assert set(TOPOLOGIES) >= {
        "cloudmatrix-384", "dgx-h100", "fat-tree-1024", "gb200-nvl72", "gti-hgx-8", "gtt-hgx-8", "mi300x-xgmi-8",
        "pod-rack-board-chip", "tpu-v5p-4x4x4", "tpu-v5p-8x8x8", "tpu-v6e-16x16",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["chips", "topologies"])
def test_they_are_listed(kind):
    result = CliRunner().invoke(main, ["list", kind, "--json"])
    assert result.exit_code == 0
    assert list(json.loads(result.stdout)) == preset_names(kind)
    shown = CliRunner().invoke(main, ["list", kind])
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 120
    heads = [line.split() for line in shown.stdout.splitlines() if line.strip()]
    assert all(any(name in words for words in heads) for name in preset_names(kind))


@pytest.mark.parametrize(("kind", "name"), [*(("chips", n) for n in CHIPS), *(("topologies", n) for n in TOPOLOGIES)])
def test_every_number_has_its_source(kind, name):
    """Beside it, above it, or above all of them for each that says nothing else."""
    lines = locate(kind, name).read_text(encoding="utf-8").splitlines()
    for place, line in enumerate(lines):
        if re.match(r"\w+ = [\[0-9]", line):
            said = "#" in line or lines[place - 1].startswith("#")
            assert said or any(re.match(r"# .*(Every number unless noted|Peaks): ", above) for above in lines[:place])
    assert f'name = "{name}"' in lines


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_runs(name):
    """One layer's worth of a prefill is work at a rate no higher than the chip's."""
    point = {"model": "llama-3.1-8b", "chip": name, "topology": "hgx-8", "n_chips": 2, "tp": 2, "cp": 1,
             "phase": "prefill", "seq_len": "4K"}  # fmt: skip
    result = g5cp_vec.run({"fixed": point})
    assert 0 < result.mfu < 1
    chip = load_chip(name)
    assert chip.calibrated == (name in {"b200-sxm", "h100-sxm", "h200-sxm", "h100-96gb-500w"})
    # Operations for each byte of memory traffic, at peak: an order of magnitude tells a slip in units.
    assert 30 < chip.peak("bf16") / chip.hbm_bandwidth_bytes_per_s < 1000


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_runs(name, tmp_path):
    """Prefill and decode, with cp and without, checked, swept and audited."""
    n_chips = load_topology(name).max_chips() or 32
    if name not in {"tpu-v5p-4x4x4", "tpu-v5p-8x8x8", "tpu-v6e-16x16"}:
        n_chips = min(n_chips, 32)
    grid = tmp_path / "grid.toml"
    grid.write_text(
        f'[fixed]\nmodel = "llama-3.1-8b"\nchip = "h200-sxm"\ntopology = "{name}"\nn_chips = {n_chips}\ntp = 4\n'
        'seq_len = "16K"\n[axes]\nphase = ["prefill", "decode"]\ncp = [1, 2]\n[points]\non_invalid = "error"\n'
    )
    for command in (["check", str(grid)], ["sweep", str(grid), "-o", str(tmp_path / "out"), "--quiet"]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
    rows = g5cp_vec.sweep(str(grid))
    assert rows["status"].to_list() == ["ok"] * 4
    assert rows.filter(rows["cp"] == 2)["comm_s"].min() > 0
    assert rows["lost_bytes"].drop_nulls().to_list() == [0] * 4


def test_the_clusters_of_the_study():
    """A rank of the RDMA cluster gets 26.45 of its 50 GB/s beyond its node, one of the TCP cluster 3 of its 12.5."""
    rates = [build_network(load_topology(name), 16).capacities()[:2] for name in ("gtt-hgx-8", "gti-hgx-8")]
    assert rates == [pytest.approx([355.5e9, 26.45e9]), pytest.approx([355.5e9, 3e9])]
    chip = load_chip("h100-96gb-500w")
    assert (chip.hbm_bytes, chip.hbm_bandwidth_bytes_per_s, chip.peak("bf16")) == (96 * 10**9, 2.4e12, 8e14)


def test_efficiencies_of_the_two_tiers(tmp_path):
    """They reduce what their own tier carries, an oversubscribed spine included, besides the protocol's."""
    text = locate("topologies", "hgx-8-oversub2").read_text(encoding="utf-8")
    path = tmp_path / "lab.toml"
    path.write_text(text + "scale_up_efficiency = 0.8\nscale_out_efficiency = 0.5\nprotocol_efficiency = 0.9\n")
    found = build_network(load_topology(str(path)), 16).capacities()
    assert found == pytest.approx([450e9 * 0.8 * 0.9, 50e9 * 0.5 * 0.9, 8 * 50e9 / 2 * 0.5 * 0.9], rel=1e-12)


def test_tori_are_as_large_as_their_names():
    for name in TOPOLOGIES:
        if dims := re.search(r"-(\d+(?:x\d+)+)$", name):
            assert load_topology(name).max_chips() == math.prod(int(size) for size in dims[1].split("x"))
