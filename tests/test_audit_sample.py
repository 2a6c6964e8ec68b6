"""Which rows of a sweep are audited."""

from __future__ import annotations

import pytest

import g5cp_vec
from g5cp_vec.config.grid import load_grid
from g5cp_vec.runner import plan
from g5cp_vec.runner.api import expand_and_plan

GRID = {
    "fixed": {"model": "llama-3.1-8b", "chip": "h100-sxm", "topology": "hgx-8", "n_chips": 8, "phase": "prefill"},
    "axes": {"tp": [1, 2, 4, 8], "cp": [1, 2, 4, 8], "seq_len": {"from": 8192, "to": 65536, "steps": 30}},
}


def audited(sample):
    """Audited rows that are the first of their structure, and all."""
    expansion, planned = expand_and_plan(load_grid(GRID), "exact", sample)
    first = {}
    for part in planned.parts:
        for batch in part:
            first.setdefault(batch.key, batch.slices[0].rows[0])
    firsts = [row for key, row in first.items() if isinstance(key, tuple)]
    return planned.audited[firsts].tolist(), int(planned.audited.sum()), planned


def test_a_sample_has_every_structure():
    firsts, n, planned = audited("sample")
    assert all(firsts)
    assert len(firsts) == planned.n_structures
    assert planned.n_structures < n <= planned.n_structures + plan.SAMPLED_ROWS


@pytest.mark.parametrize("share", [2, 3, 1000])
def test_a_sample_of_very_many_operations_has_every_nth(monkeypatch, share):
    _, _, planned = audited("sample")
    deployments = load_grid(GRID).expand().deployments
    # Every structure has one deployment here, of one pass.
    together = sum(plan.estimated_ops(dep, "full") for dep in deployments if not isinstance(dep, str))
    monkeypatch.setattr(plan, "SAMPLED_OPS_TOGETHER", -(-together // share))
    monkeypatch.setattr(plan, "SAMPLED_ROWS", 1)  # the very first, which is there anyway
    firsts, n, _ = audited("sample")
    assert firsts == [i % share == 0 for i in range(planned.n_structures)]
    assert n == sum(firsts)


def test_all_and_none():
    assert audited("none")[1] == 0
    rows = g5cp_vec.sweep({**GRID, "axes": {**GRID["axes"], "seq_len": [8192]}}, audit="all")
    valid = rows.filter(rows["status"] != "invalid")
    assert valid["lost_ops"].to_list() == [0] * len(valid)
