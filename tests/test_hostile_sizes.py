"""What is too large: refused in one line before memory or patience is gone, or said to take long."""

from __future__ import annotations

import json
import time

import pytest
from commands import POINT, invoke

from g5cp_vec.cli import _words
from g5cp_vec.config._files import describe
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.model import load_model
from g5cp_vec.config.topology import load_topology
from g5cp_vec.errors import ConfigError
from g5cp_vec.runner import room

MODEL = 'hidden = 64\nvocab = 100\nn_layers = 4\nd_ff = 128\ndtype = "bf16"\n'
ATTENTION = '[attention]\nkind = "gqa"\nn_heads = 4\nn_kv_heads = 4\nhead_dim = 16\n'
HGX = (
    'kind = "hgx"\nnode_size = 2\nscale_up_gbytes_per_s = 450.0\nscale_up_latency_us = 2.0\nnics_per_node = 2\n'
    "nic_gbytes_per_s = 50.0\nscale_out_latency_us = 5.0\n"
)
MACHINE = {
    "pods": [{"count": 1, "racks": [{"count": 1, "boards": [{"count": 1, "chips": [{"name": "c", "count": 2}]}]}]}],
    "interconnect": {"links": {"c2c": {"bandwidth_gbps": 100, "latency_us": 1}}},
    "connections": [{"source": "pod_0/rack_0/board_0/chip_0", "target": "pod_0/rack_0/board_0/chip_1", "type": "c2c"}],
}
CHIP = {
    "memory": {"gmem": {"capacity_gb": 64, "bandwidth_gbps": 1000}},
    "cores": {"count": 4, "lanes_per_core": 8},
    "frequency_ghz": 1.5,
    "compute_units": {"cube": {"mac_per_lane": {"BF16": 1000, "FP8": 2000}}},
}


def refusal(load, path, text):
    """Return the only line of a refusal, without the file's name."""
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(str(path))
    (line,) = refused.value.lines
    return line.removeprefix(f"{path}: ")


# ---- numbers ----


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("n_layers = 4", "n_layers = 9223372036854775807", "n_layers: expected less than or equal to 65536, got 9223"),
        ("n_layers = 4", f"n_layers = 1{'0' * 400}", "n_layers: expected less than or equal to 65536, got 1000"),
        ("hidden = 64", "hidden = 18446744073709551616", "hidden: expected less than or equal to 1000000000000000000"),
        ("d_ff = 128", "d_ff = 18446744073709551616", "d_ff: expected less than or equal to 1000000000000000000"),
        ("head_dim = 16", "head_dim = 18446744073709551616", "attention.head_dim: expected less than or equal to"),
        ("vocab = 100", f"vocab = 0x{'f' * 6000}", "holds an integer of thousands of digits"),
    ],
)
def test_counts_of_a_model(tmp_path, old, new, said):
    assert refusal(load_model, tmp_path / "m.toml", (MODEL + ATTENTION).replace(old, new)).startswith(said)


def test_layers_that_repeat_for_ever(tmp_path):
    text = MODEL + ATTENTION + "[[layer]]\nrepeat = 9223372036854775807\n"
    assert "layer[0].repeat: expected less than or equal to 65536" in refusal(load_model, tmp_path / "m.toml", text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HGX.replace("nics_per_node = 2", "nics_per_node = 2147483647"), "nics_per_node: expected less than or equal"),
        (HGX + "oversubscription = 1e308\n", "oversubscription: expected a quantity that is within 1e-30 to 1e+30"),
        (
            HGX.replace("nic_gbytes_per_s = 50.0", "nic_gbytes_per_s = 1e-35") + "protocol_efficiency = 1e-9\n",
            "protocol_efficiency: 1e-09 leaves a bandwidth of next to nothing",
        ),
        (f"kind = 0x{'f' * 6000}\n", "holds an integer of thousands of digits"),
        (
            HGX + "[[efficiency]]\nbytes = 18446744073709551616\nfraction = 0.5\n",
            "efficiency[0].bytes: expected less than or equal to 1000000000000000000",
        ),
    ],
)
def test_numbers_of_a_topology(tmp_path, text, said):
    assert refusal(load_topology, tmp_path / "t.toml", text).startswith(said)


def test_more_links_than_can_be_numbered(tmp_path):
    (tmp_path / "t.toml").write_text(HGX.replace("nics_per_node = 2", "nics_per_node = 65536"))
    topology = load_topology(str(tmp_path / "t.toml"))
    assert topology.obstacle(128) is None
    assert "links, expected at most 16777216" in topology.obstacle(1024)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bandwidth_gbps": 1e30}, "bandwidth_gbps: expected a quantity that is within 1e-30 to 1e+30 in SI units"),
        ({"bandwidth_gbps": 1e-38}, "bandwidth_gbps: expected a quantity that is within"),
    ],
)
def test_rates_of_a_grouped_machine(tmp_path, change, said):
    table = json.loads(json.dumps(MACHINE))
    table["interconnect"]["links"]["c2c"] |= change
    line = refusal(load_topology, tmp_path / "t.yaml", json.dumps(table))
    assert line.startswith(f"interconnect.links.c2c.{said}")


def test_sums_of_latencies_may_be_long(tmp_path):
    table = json.loads(json.dumps(MACHINE).replace("c2c", "b2b"))
    table["interconnect"]["links"]["b2b"]["latency_us"] = 1e36
    table["interconnect"]["comm_params"] = {"switch_latency_us": 1e36, "cable_latency_us": 1e36}
    (tmp_path / "t.yaml").write_text(json.dumps(table))
    assert load_topology(str(tmp_path / "t.yaml")).link_type[0].latency_s == pytest.approx(3e30)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("cores", "count"), 1e15, None),
        (("memory", "gmem", "capacity_gb"), 1e10, "memory.gmem.capacity_gb: expected a number from 1e-06 to 1e+09"),
        (
            ("compute_units", "cube", "mac_per_lane", "BF16"),
            1e15,
            "compute_units.cube.mac_per_lane.BF16: expected a peak rate",
        ),
        (("compute_units", "cube", "mac_per_lane", "bf16"), 7, "compute_units.cube.mac_per_lane.bf16: stands twice"),
    ],
)
def test_numbers_of_a_grouped_chip(tmp_path, place, value, said):
    chip = json.loads(json.dumps(CHIP))
    if said and "peak" in said:
        chip["cores"]["count"] = 1e9
    table = chip
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    path = tmp_path / "c.yaml"
    if said is None:
        path.write_text(json.dumps({"chips": {"x": chip}}))
        assert load_chip(str(path)).peak("bf16") == 2 * 1000 * 1e15 * 8 * 1.5e9
    else:
        assert refusal(load_chip, path, json.dumps({"chips": {"x": chip}})).startswith(f"chips.x.{said}")


def test_values_are_described_whatever_they_are():
    assert describe(None) == "null"
    assert describe([16**5000]) == "an integer of thousands of digits"
    assert len(describe("x" * 10**6)) == 60


# ---- memory ----


@pytest.fixture
def point(tmp_path):
    path = tmp_path / "point.toml"
    path.write_text(POINT)
    return path


def test_a_large_point_is_not_audited_and_says_so(point, monkeypatch):
    whole = json.loads(invoke("run", point, "--json").stdout)
    monkeypatch.setattr("g5cp_vec.runner.api.POINT_OPS", 10)
    result = invoke("run", point, "--json")
    row = json.loads(result.stdout)
    assert result.stderr.startswith(f"note: not audited: {row['n_ops']:,} operations of all ranks and layers")
    assert row["lost_ops"] is None
    assert whole["lost_ops"] == 0
    assert row["ttft_s"] == whole["ttft_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--fidelity", "full"), "take --fidelity exact"),
        (("sweep", "--fidelity", "full"), "take --fidelity exact"),
        (("sweep", "--audit", "all"), "audit a sample, or nothing"),
        (("run", "--breakdown"), "leave --breakdown out"),
    ],
)
def test_what_has_no_room_is_refused_before_it_begins(point, tmp_path, monkeypatch, words, said):
    monkeypatch.setattr("g5cp_vec.runner.api.POINT_OPS", 10)
    monkeypatch.setattr(room, "memory_bytes", lambda: 1000)
    out = ("-o", tmp_path / "out") if words[0] == "sweep" else ()
    result = invoke(words[0], point, *words[1:], *out)
    assert result.exit_code == 2
    line = result.stderr.splitlines()[-1]
    assert "operations of all ranks and layers take" in line
    assert said in line
    assert not (tmp_path / "out").exists()


def test_memory_is_that_of_the_container(tmp_path, monkeypatch):
    (tmp_path / "limit").write_text("123456\n")
    (tmp_path / "none").write_text("max\n")
    monkeypatch.setattr(room, "_CGROUP_LIMITS", [str(tmp_path / name) for name in ("limit", "none", "absent")])
    assert room.memory_bytes() == 123456


def test_too_many_rows_to_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("g5cp_vec.cli.calibrate.MOST_FITTED_ROWS", 5)
    rows = "".join(f"{128 * i},4096,4096,bfloat16,{0.05 * i}\n" for i in range(1, 9))
    (tmp_path / "t.csv").write_text(f"m,n,k,gemm_dtype,latency_ms\n{rows}")
    result = invoke("calibrate", tmp_path / "t.csv", "--chip", "h100-sxm", "-o", tmp_path / "o.toml")
    assert result.exit_code == 2
    assert "gemm: 8 rows to fit, expected at most 5" in result.stderr
    assert invoke("calibrate", tmp_path / "t.csv", "--chip", "h100-sxm", "--evaluate").exit_code == 0


def test_sizes_that_span_too_large_a_grid(tmp_path):
    rows = "".join(f"{97 * i},{89 * i},{83 * i},bfloat16,{i}\n" for i in range(1, 90))
    (tmp_path / "t.csv").write_text(f"m,n,k,gemm_dtype,latency_ms\n{rows}")
    result = invoke("calibrate", tmp_path / "t.csv", "--chip", "h100-sxm", "-o", tmp_path / "o.toml")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "gemm: the sizes of 89 rows span a grid of 89 m x 89 n x 89 k = 704,969 nodes, expected at most" in line
    assert not (tmp_path / "o.toml").exists()


# ---- words and silence ----


@pytest.mark.parametrize("n", [1, 19, 20, 21, 400])
def test_long_complaints_are_cut_and_many_are_counted(tmp_path, n):
    values = ", ".join(f'"{"x" * 2000}{i}"' for i in range(n))
    (tmp_path / "g.toml").write_text(POINT.replace("cp = 2\n", "") + f"[axes]\ncp = [{values}]\n")
    lines = invoke("check", tmp_path / "g.toml").stderr.splitlines()
    assert len(lines) == min(n, 21)
    assert all(line.startswith("error: ") and len(line) <= len("error: ") + _words.MOST_CHARACTERS for line in lines)
    assert (lines[-1] == f"error: and {n - 20} more like these") == (n > 20)


@pytest.mark.parametrize(
    "words",
    [("check", "x" * 5000), ("list", "x" * 5000), ("x" * 5000,), ("run", "--" + "x" * 5000), ("replay", "\x01" * 3000)],
)
def test_long_words_are_cut(words):
    (line,) = invoke(*words).stderr.splitlines()
    assert len(line) <= len("error: ") + _words.MOST_CHARACTERS
    assert line.isprintable()


@pytest.mark.parametrize("brackets", [10, 500, 20_000])
def test_a_filter_of_brackets(tmp_path, brackets):
    where = "(" * brackets + "tp = 1" + ")" * brackets
    (tmp_path / "g.toml").write_text(f'{POINT}[points]\nwhere = "{where}"\n')
    result = invoke("check", tmp_path / "g.toml")
    assert result.exit_code in (0, 2)
    assert all(len(line) <= len("error: ") + _words.MOST_CHARACTERS for line in result.stderr.splitlines())


def test_beginning_and_end_of_a_complaint_stay():
    cut = _words.one_line("what: where: " + "x" * 10_000 + "; do this")
    assert len(cut) == _words.MOST_CHARACTERS
    assert cut.startswith("what: where: ")
    assert cut.endswith("; do this")
    assert _words.one_line("\n" * 599).isprintable()


@pytest.mark.parametrize("quiet", [False, True])
def test_a_long_silence_is_broken(point, tmp_path, monkeypatch, quiet):
    slept = []

    def slowly(*words):
        time.sleep(0.3)
        slept.append(words)
        raise ConfigError("enough")

    monkeypatch.setattr(_words, "SILENCE_S", 0.05)
    monkeypatch.setattr("g5cp_vec.runner.local.LocalRunner.run_part", slowly)
    result = invoke("sweep", point, "-o", tmp_path / "out", *(["--quiet"] if quiet else []))
    assert slept
    said = [line for line in result.stderr.splitlines() if line.startswith("still simulating, ")]
    assert bool(said) != quiet
    assert result.stderr.splitlines()[-1] == "error: enough"


def test_ranks_of_very_many_chips_are_plain_lines(point):
    point.write_text(POINT.replace("n_chips = 2", "n_chips = 8192"))
    begun_s = time.process_time()
    lines = invoke("check", point, "--ranks").stdout.splitlines()
    assert time.process_time() - begun_s < 5
    at = lines.index("chip\tdp\tpp\tcp\ttp\tKV shard")
    assert [line.split("\t")[0] for line in lines[at + 1 : at + 8193]] == [str(chip) for chip in range(8192)]
    assert lines[at + 8193] == "group\tchips"


@pytest.mark.parametrize("value", ["x" * 10**5, [1] * 10**5, {"a" * 10**5: 1}, None, True])
def test_complaints_about_workloads_quote_a_part(tmp_path, value):
    wrong = {"links": [value, {"bw": value}], "chips": 1, "deps": [value, [value, 0]], "ops": []}
    wrong["ops"] = [{"kind": "flow", "route": value, "bytes": value}, {"kind": "compute", "chip": value, "secs": 1}]
    (tmp_path / "w.json").write_text(json.dumps(wrong))
    lines = invoke("replay", tmp_path / "w.json").stderr.splitlines()
    assert len(lines) >= 6
    assert all(len(line) < 200 + len(str(tmp_path)) for line in lines)
