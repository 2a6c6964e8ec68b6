"""`collective = "best"`: every point takes the faster algorithm, whole and audited."""

from __future__ import annotations

import pytest
from test_acceptance_tools import sweep_rows

from g5cp_vec import run, sweep
from g5cp_vec.errors import InfeasibleError

FIXED = {
    "model": "llama-3.1-8b", "chip": "h100-sxm", "topology": "hgx-8", "phase": "decode", "cp": 1, "tp": 16,
    "n_chips": 32, "pcp": 2, "seq_len": 8192,
}  # fmt: skip


@pytest.mark.parametrize("fidelity", ["exact", "full"])
def test_every_row_is_that_of_the_faster_one(fidelity):
    axes = {"batch": [1, 64], "topology": ["hgx-8-oversub2", "flat-450"], "phase": ["decode", "prefill"]}
    fixed = {key: value for key, value in FIXED.items() if key not in axes}
    rows = {
        name: sweep_rows(fixed | {"collective": name}, fidelity, **axes) for name in ("ring", "direct", "best")
    }  # fmt: skip
    chosen = set()
    for ring, direct, best in zip(rows["ring"], rows["direct"], rows["best"], strict=True):
        faster = ring if ring["step_s"] <= direct["step_s"] else direct
        name = faster["collective"]
        assert best["chosen_collective"] == name
        assert ring["chosen_collective"] is None
        apart = {key for key in best if best[key] != faster[key]}
        assert apart == {"point_id", "collective", "chosen_collective"}
        chosen.add(name)
    assert chosen == {"ring", "direct"}


def test_it_is_audited():
    frame = sweep({"name": "t", "fixed": FIXED | {"collective": "best"}, "axes": {"dcp": [1]}}, audit="all")
    assert frame["lost_bytes"].to_list() == [0]
    result = run({"name": "p", "fixed": FIXED | {"collective": "best"}})
    assert result.lost_ops == 0
    assert result.breakdown().step_s == result.step_s


def test_the_closed_form_cannot_choose():
    with pytest.raises(InfeasibleError, match='collective = "best" is chosen by simulation'):
        run({"name": "p", "fixed": FIXED | {"pcp": 1, "n_chips": 16, "path": "math", "collective": "best"}})
