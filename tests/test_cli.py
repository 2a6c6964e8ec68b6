"""The command line beside `sweep`: help, exit statuses, messages, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import Result
from commands import POINT, invoke

from g5cp_vec import __version__
from g5cp_vec.cli import main
from g5cp_vec.errors import SimulationError
from g5cp_vec.runner.schema import KPIS, SCHEMA

COMMANDS = sorted(main.commands)
GRID = """
name = "small"
[fixed]
phase = "prefill"
model = "llama-3.1-8b"
chip = "h100-sxm"
topology = "flat-450"
n_chips = 4
[axes]
tp = [1, 3]
cp = [1, 3]
seq_len = ["1K", "2K"]
"""
CHAIN = {
    "links": [{"bw": 10.0, "lat": 0.5}],
    "chips": 1,
    "ops": [
        {"kind": "compute", "chip": 0, "secs": 2.0, "prio": 0},
        {"kind": "flow", "route": [0], "bytes": 20.0, "lat": 0.25},
    ],
    "deps": [[0, 1]],
}


@pytest.fixture
def point(tmp_path):
    path = tmp_path / "point.toml"
    path.write_text(POINT)
    return path


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


def refused(result: Result) -> str:
    """Return the complaint of a command that found its input wrong."""
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    return result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert f"Example:\n    g5cp-vec {name} " in result.stdout
    # The one line in the list of commands is whole.
    assert not main.commands[name].get_short_help_str(limit=64).endswith("...")


def test_every_example_parses():
    for name in COMMANDS:
        words = (main.commands[name].epilog or "").split("g5cp-vec")[1].split()
        assert words[0] == name
        main.commands[name].make_context(name, words[1:])


def test_version_and_no_arguments():
    assert __version__ in invoke("--version").stdout
    assert "Usage" in invoke().output


def test_help_and_import_load_nothing_heavy():
    code = (
        "import sys, g5cp_vec; from g5cp_vec.cli import main\n"
        "try: main(['sweep', '--help'])\n"
        "except SystemExit: pass\n"
        "print('loaded:', *({'numba', 'numpy', 'polars', 'rich', 'pydantic', 'pyarrow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_unknown_command_and_option_are_refused():
    refused(invoke("swep"))
    refused(invoke("run", "--jsn", "x.toml"))


@pytest.mark.parametrize("name", ["sweep", "run", "check", "replay", "validate"])
def test_missing_file_is_one_line(name, tmp_path):
    missing = tmp_path / "nowhere.toml"
    lines = refused(invoke(name, missing)).splitlines()
    complaints = [line for line in lines if line.startswith("error: ")]
    assert len(complaints) == 1
    assert str(missing) in complaints[0]


def test_run_prints_a_grouped_table(point):
    result = invoke("run", point)
    assert result.exit_code == 0
    for text in ("point", "times", "memory", "traffic", "audit", "ttft_s", "passkv_bytes", "lost_flops"):
        assert text in result.stdout
    assert "calibrated = false" not in result.stdout
    point.write_text(point.read_text().replace("h100-sxm", "sg2262"))
    assert "calibrated = false" in invoke("run", point).stdout


def test_run_json_is_one_line_with_every_column(point):
    result = invoke("run", point, "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    row = json.loads(result.stdout)
    assert list(row) == list(SCHEMA)
    assert row["status"] == "ok"
    assert row["ttft_s"] > 0
    assert row["tpot_s"] is None
    assert [row[kpi] for kpi in KPIS] == [0] * 6


def test_run_full_equals_exact(point):
    exact, full = (json.loads(invoke("run", point, "--json", "--fidelity", f).stdout) for f in ("exact", "full"))
    assert full["ttft_s"] == pytest.approx(exact["ttft_s"], rel=1e-12)
    assert full["n_ops_simulated"] == full["n_ops"] >= exact["n_ops_simulated"]


def test_run_oom_exits_0(point):
    point.write_text(POINT.replace("1K", "4M"))
    result = invoke("run", point, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["status"] == "oom"


def test_run_invalid_exits_2_and_names_the_file(point):
    point.write_text(POINT.replace("cp = 2", "cp = 3"))
    line = refused(invoke("run", point))
    assert str(point) in line
    assert "n_chips = 2" in line


def test_run_lists_every_complaint(point):
    point.write_text(POINT.replace("cp = 2", "tpp = 2").replace('"1K"', '"1Q"'))
    complaints = refused(invoke("run", point))
    assert "fixed.tpp: unknown key" in complaints
    assert "fixed.seq_len" in complaints
    assert "add cp = 1" in complaints
    assert all(line.startswith("error: ") for line in complaints.splitlines() if "compiling" not in line)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (SimulationError("ops[3]: the simulation makes no progress"), 2, "defect"),
        (MemoryError(), 2, "not enough memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_are_lines(monkeypatch, point, error, status, text):
    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr("g5cp_vec.runner.api.run_point", fail)
    result = invoke("run", point)
    assert result.exit_code == status
    assert text in result.stderr
    assert result.stdout == ""


def test_check_counts_and_explains(grid):
    result = invoke("check", grid)
    assert result.exit_code == 0
    cells = [line.split() for line in result.stdout.splitlines()]
    assert ["points", "8"] in cells
    assert ["valid", "2"] in cells
    assert ["invalid", "6"] in cells
    assert ["structures", "1"] in cells
    assert "estimates" in result.stdout
    reasons = [line for line in result.stdout.splitlines() if 'dp = "auto" is not whole' in line]
    assert len(reasons) == 3
    assert all(line.split()[-1] == "2" for line in reasons)


def test_check_simulates_nothing(grid):
    code = (
        "import sys; from g5cp_vec.cli import main\n"
        f"try: main(['check', {str(grid)!r}])\n"
        "except SystemExit: pass\n"
        "import g5cp_vec.engine.batch as b; print('compiled:', len(b.run_rows.signatures))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "compiled: 0"


def test_check_says_what_a_sweep_would_refuse(grid):
    grid.write_text(GRID + '[points]\non_invalid = "error"\n')
    result = invoke("check", grid)
    assert "6 points are invalid" in refused(result)
    assert "is not whole" in result.stdout


def test_replay_hand_case(tmp_path):
    # 2 s of compute, then 0.75 s of latency and 20 B at 10 B/s.
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(CHAIN))
    result = invoke("replay", path, "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    times = json.loads(result.stdout)
    assert times["makespan"] == pytest.approx(4.75)
    assert times["finish"] == pytest.approx([2.0, 4.75])
    assert len(times["start"]) == 2
    table = invoke("replay", path).stdout
    assert table.startswith("makespan: 4.75 s\n")
    assert [line.split() for line in table.splitlines()[2:]] == [["0", "0.0", "2.0"], ["1", "2.0", "4.75"]]


def test_replay_refuses_with_the_place(tmp_path):
    path = tmp_path / "chain.json"
    path.write_text(json.dumps({**CHAIN, "deps": [[0, 1], [1, 0]]}))
    assert "cycle" in refused(invoke("replay", path))
    path.write_text("{")
    assert "not valid JSON" in refused(invoke("replay", path))


@pytest.mark.parametrize(
    ("kind", "name", "number"),
    [("models", "deepseek-v3-671b", "7168"), ("chips", "sg2262", "8601.6"), ("topologies", "nvl72", "900.0")],
)
def test_list(kind, name, number):
    result = invoke("list", kind)
    assert result.exit_code == 0
    assert name in result.stdout
    assert number in result.stdout
    presets = json.loads(invoke("list", kind, "--json").stdout)
    assert number in json.dumps(presets[name])


def test_list_refuses_other_kinds():
    assert "chips" in refused(invoke("list", "runtime"))


def test_closed_pipe_is_quiet(tmp_path):
    # More output than a pipe holds, so that the command meets the closed end.
    path = tmp_path / "many.json"
    path.write_text(json.dumps({**CHAIN, "ops": CHAIN["ops"][:1] * 10_000, "deps": []}))
    # Unbuffered, Python takes a write cut short for a whole one.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    for option in ([], ["--json"]):
        command = [sys.executable, "-m", "g5cp_vec.cli", "replay", str(path), *option]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(10)
            process.stdout.close()
            assert b"Traceback" not in process.stderr.read()
        assert process.returncode == 141
