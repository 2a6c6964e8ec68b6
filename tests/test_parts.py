"""Parts are of some seconds' work, whatever makes it: structures, rows, passes or audits."""

from __future__ import annotations

from pathlib import Path

import pytest

import g5cp_vec
from g5cp_vec.config.grid import load_grid
from g5cp_vec.runner import plan
from g5cp_vec.runner.api import expand_and_plan
from g5cp_vec.runner.local import LocalRunner

SWEEPS = Path(__file__).parent.parent / "sweeps"
FIXED = {"model": "llama-3.1-8b", "chip": "h100-sxm", "topology": "hgx-8", "n_chips": 16}
AXES = {"phase": ["prefill", "decode"], "tp": [1, 2, 4, 8, 3], "cp": [1, 2, 4, 8, 16], "seq_len": [8192, 16384, 32768]}
GRID = {"name": "g", "fixed": FIXED, "axes": AXES}
CHUNKED = {
    "name": "g",
    "fixed": {**FIXED, "cp": 1, "tp": 8, "pcp": 2, "phase": "prefill", "seq_len": 131072},
    "axes": {"dcp": [1, 2], "chunk_tokens": [0, 2048, 8192, 32768]},
}


def planned(grid, audit="none"):
    return expand_and_plan(load_grid(grid), "exact", audit)


def works(grid, audit):
    """Rows of each part, and its work: structures, and rows that take passes and audits."""
    expansion, parts = planned(grid, audit)
    passes = plan.passes_of_rows(expansion)
    for part in parts.parts:
        rows, work = [], 0
        for batch in part:
            some = [int(row) for s in batch.slices for row in s.rows]
            rows += some
            if batch.kind == "invalid":
                work += len(some)
                continue
            work += plan.STRUCTURE_WORK
            for row in some:
                dep = expansion.deployments[expansion.deployment[row]]
                ops = plan.estimated_ops(dep, "exact") + (dep.pcp > 1) * plan.PASS_WORK
                audited = parts.audited[row] * plan.AUDIT_WORK * plan.estimated_ops(dep, "full")
                work += int(passes[row]) * (ops + int(audited))
        yield rows, work


@pytest.mark.parametrize("audit", ["none", "sample", "all"])
@pytest.mark.parametrize("grid", [GRID, CHUNKED], ids=["plain", "chunked"])
@pytest.mark.parametrize("most", [1, 250_000, 600_000])
def test_parts_have_as_much_work_as_fits(monkeypatch, grid, audit, most):
    (whole,) = [rows for rows, _ in works(grid, "none")]
    monkeypatch.setattr(plan, "OPS_PER_PART", most)
    parts = list(works(grid, audit))
    assert len(parts) > 1
    for rows, work in parts:
        assert work <= most or len(rows) == 1
    # Of parts next to each other no two would be one.
    for (_, work), (_, following) in zip(parts, parts[1:], strict=False):
        assert work + following > most
    assert [row for rows, _ in parts for row in rows] == whole


def test_a_shipped_grid_of_many_structures_is_written_in_steps():
    _, parts = planned(SWEEPS / "same_chips_which_split.toml")
    n_rows = [sum(batch.n_rows for batch in part) for part in parts.parts]
    assert len(n_rows) > 10
    # The first part has what cannot be.
    assert max(n_rows[1:]) < 1000


def test_an_interrupted_sweep_keeps_its_parts_and_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "OPS_PER_PART", 6 * plan.STRUCTURE_WORK)
    frame = g5cp_vec.sweep(GRID, tmp_path / "whole", audit="none")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("part-*")}
    assert len(whole) >= 5
    run_part, calls = LocalRunner.run_part, []

    def interrupted(self, part):
        calls.append(part)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run_part(self, part)

    with monkeypatch.context() as patch:
        patch.setattr(LocalRunner, "run_part", interrupted)
        with pytest.raises(KeyboardInterrupt):
            g5cp_vec.sweep(GRID, tmp_path / "again", audit="none")
    assert len(list((tmp_path / "again").glob("part-*"))) == 2
    assert g5cp_vec.sweep(GRID, tmp_path / "again", audit="none").equals(frame)
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").glob("part-*")} == whole
