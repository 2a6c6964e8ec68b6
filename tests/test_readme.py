"""README.md and .ci/run: what they show is what the project does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from g5cp_vec.cli import main
from g5cp_vec.config._keys import KEYS
from g5cp_vec.config.attention import Attention, Indexer, Linear
from g5cp_vec.config.chip import Efficiency, load_chip
from g5cp_vec.config.grid import load_grid
from g5cp_vec.config.layers import Moe
from g5cp_vec.errors import ConfigError
from g5cp_vec.runner.schema import SCHEMA

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(after: str) -> str:
    """Return the first fenced block after a text."""
    return README[README.index(after) :].split("```")[1].split("\n", 1)[1]


def test_ci_runs_the_test_command_of_the_readme():
    command = block("## Tests").strip()
    assert "\n" not in command
    script = ROOT / ".ci" / "run"
    assert command in script.read_text(encoding="utf-8").splitlines()
    assert os.access(script, os.X_OK)
    for part in ("venv", "'.[dev]'", "ruff check", "mypy", "lint-imports", "pytest"):
        assert part in command


def test_first_command_sets_up_and_runs_the_quickstart():
    command = block("## One sweep").strip()
    assert "\n" not in command
    assert command.endswith("g5cp-vec sweep sweeps/quickstart.toml")
    assert "venv" in command


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_is_named(name):
    assert f"`g5cp-vec {name} " in README


@pytest.mark.parametrize("name", sorted(set(SCHEMA) | set(KEYS)))
def test_every_column_and_key_is_named(name):
    assert f"`{name}`" in README


def test_no_other_column_is_promised():
    table = README[README.index("## Result columns") : README.index("## How far")]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(first_cells))) == set(SCHEMA)


def test_defaults_are_as_said():
    said = README[README.index("Other keys and their defaults") : README.index("## Result columns")]
    for name, default in re.findall(r'`(\w+) = ("?[^`]+)`', said):
        if KEYS[name].default is None:
            continue  # follows from the rest of the point
        shown = default.strip('"')
        expected = KEYS[name].default
        text = str(expected).lower() if isinstance(expected, bool) else str(expected)
        assert shown == text or [word.strip(' "[]') for word in shown.split(",")] == list(expected)


def test_grid_of_the_readme_is_valid(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(block("## A grid"))
    assert len(load_grid(path).expand()) > 0


def test_every_room_is_in_the_layout():
    rooms = {path.parent.name for path in (ROOT / "g5cp_vec").glob("*/__init__.py")}
    assert set(re.findall(r"^g5cp_vec/(\w+) ", block("## Layout"), re.MULTILINE)) == rooms


def test_every_shipped_sweep_is_named():
    assert all(f"{path.name}`" in README for path in (ROOT / "sweeps").glob("*.toml"))


def test_output_and_python_are_real(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["sweep", str(ROOT / "sweeps" / "quickstart.toml"), "--audit", "none"])
    assert result.exit_code == 0
    # Times of this machine stand in the last line only.
    *tables, timing = [line.rstrip() for line in result.stdout.splitlines()]
    shown = [line.rstrip() for line in block("after that this one takes seconds").splitlines()]
    assert shown[0] in result.stderr
    # What is left out is marked; each piece stands in the output as it is, and only rows of flat-450 lie between them.
    printed = [line for line in tables if line]
    for piece in "\n".join(line for line in shown[1:-1] if line).split("\n …\n"):
        while printed[0].startswith(" flat-450"):
            del printed[0]
        lines = piece.splitlines()
        assert printed[: len(lines)] == lines
        del printed[: len(lines)]
    assert printed == []
    pattern = r"448 points in [\d.]+ m?s \([\d.]+ points/s\); dataset: results/quickstart/part-\*\.parquet"
    assert re.fullmatch(pattern, timing)
    assert re.fullmatch(pattern, shown[-1])
    exec(README.split("```python")[1].split("```")[0], {})
    assert "ttft_s" in capsys.readouterr().out


def test_the_chip_of_the_readme_is_one_with_default_efficiencies(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(block("A chip has dense peaks"))
    chip = load_chip(str(path))
    assert dict(chip.peak_flops) == {"bf16": 989e12, "fp8": 1978e12}
    assert chip.efficiency.model_dump(exclude={"source"}) == Efficiency().model_dump(exclude={"source"})
    assert chip.usable_memory_fraction == 0.9
    text = block("A chip has dense peaks").replace("bf16 = 989.0\n", "")
    path.write_text(text)
    with pytest.raises(ConfigError, match="bf16"):
        load_chip(str(path))


@pytest.mark.parametrize("record", [Attention, Indexer, Linear, Moe, Efficiency])
def test_every_key_of_a_layer_is_named(record):
    assert [name for name in record.model_fields if not re.search(rf"\b{name}\b", README)] == []
