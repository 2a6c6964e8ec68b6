"""Which rows of a sweep are audited."""

from __future__ import annotations

import pytest

import g5cp_vec
from g5cp_vec.config.grid import load_grid
from g5cp_vec.runner import apart, local, plan
from g5cp_vec.runner.api import expand_and_plan
from g5cp_vec.runner.schema import KPIS

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


def test_of_algorithms_that_compete_the_winner_is_audited(monkeypatch):
    degrees = {"ep": 16, "tp": 8, "n_chips": 16, "dcp": 8, "pcp": 2, "cp": 1}
    fixed = {**GRID["fixed"], **degrees, "model": "deepseek-v3-671b"}
    del fixed["phase"]
    axes = {"phase": ["prefill", "decode"], "seq_len": [4096, 131072], "batch": [1, 16], "chunk_tokens": [0, 2048]}
    grid = {"fixed": {**fixed, "collective": "best"}, "axes": axes}
    audited_with = []
    for module in (local, apart):

        def spy(dep, *rest, original=module.audit_pass):
            audited_with.append(dep.collective)
            return original(dep, *rest)

        monkeypatch.setattr(module, "audit_pass", spy)
    rows = g5cp_vec.sweep(grid, audit="all", jobs=1)
    assert rows["lost_ops"].to_list() == rows["capacity_violations"].to_list() == [0] * len(rows)
    # One audit for each pass, with what was chosen for its row.
    n_passes = sum(n or 1 for n in rows["n_passes"])
    assert len(audited_with) == n_passes > len(rows)
    chosen = {word for word in rows["chosen_collective"] if "ring" in word and "direct" in word}
    assert len(chosen) > 0
    assert all(any(word in full for full in audited_with) for word in chosen)
    # A row that is audited is the row that is not.
    plain = g5cp_vec.sweep(grid, audit="none", jobs=1)
    assert rows.drop(*KPIS).equals(plain.drop(*KPIS))
