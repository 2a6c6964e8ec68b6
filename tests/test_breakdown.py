"""run --breakdown: its parts are the step, and those that a slow twin finds by looking at every instant."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

import g5cp_vec
from g5cp_vec.cli import main
from g5cp_vec.errors import ConfigError
from g5cp_vec.runner.breakdown import WAITING, _waits

BASE = {"chip": "h200-sxm", "topology": "hgx-8"}
POINTS = {
    "ring": {"model": "llama-3.1-8b", "phase": "prefill", "n_chips": 8, "tp": 2, "cp": 4, "seq_len": 4096},
    "chunks": {"model": "llama-3.1-8b", "phase": "prefill", "n_chips": 4, "tp": 2, "cp": 2, "seq_len": 9000,
               "chunk_tokens": 4000},
    "experts": {"model": "deepseek-v3-671b", "phase": "decode", "n_chips": 16, "tp": 8, "cp": 2, "ep": 8,
                "seq_len": 4096, "decode_form": "pass_q_ring"},
    "stages": {"model": "llama-3.1-8b", "phase": "decode", "n_chips": 16, "tp": 2, "cp": 4, "pp": 2, "seq_len": 65536},
    "study": {"model": "llama-3.1-405b", "phase": "prefill", "n_chips": 16, "tp": 8, "cp": 2, "seq_len": 8192,
              "topology": "gtt-hgx-8", "chip": "h100-96gb-500w", "ffn_dtype": "fp8"},
}  # fmt: skip


@pytest.mark.parametrize("fidelity", ["exact", "full"])
@pytest.mark.parametrize("name", POINTS)
def test_parts_add_up_to_the_columns(name, fidelity):
    result = g5cp_vec.run({"fixed": {**BASE, **POINTS[name]}}, fidelity=fidelity)
    parts = result.breakdown()
    computes, waits = parts.computes, parts.waits
    assert parts.step_s == pytest.approx(result.step_s, rel=1e-12)
    assert sum(c.seconds for c in computes) + sum(w.seconds for w in waits) == pytest.approx(result.step_s, rel=1e-9)
    assert sum(c.seconds for c in computes) == pytest.approx(result.compute_s, rel=1e-9)
    exposed = sum(w.seconds for w in waits if w.name != WAITING)
    assert exposed == pytest.approx(result.exposed_comm_s, rel=1e-6, abs=1e-12)
    assert sum(c.fixed_s for c in computes) == pytest.approx(result.overhead_s, rel=1e-9)
    (attention,) = [c for c in computes if c.name == "attention"]
    assert attention.seconds == pytest.approx(result.attention_s, rel=1e-9)
    for c in computes:
        assert c.gemm_s + c.attention_s + c.elementwise_s + c.fixed_s == pytest.approx(c.seconds, rel=1e-9, abs=1e-15)
    assert [c.seconds for c in computes] == sorted((c.seconds for c in computes), reverse=True)


def test_waits_against_every_instant():
    """Twin: cut the time at every start and end; a piece belongs to the flow in flight that began first."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        edges = np.sort(rng.choice(100, 8, replace=False)).astype(float)
        gaps = [(float(edges[i]), float(edges[i + 1]), i) for i in range(0, 8, 2)]
        start = np.sort(rng.integers(0, 95, 6)).astype(float)
        flows = [(float(s), float(s + rng.integers(1, 30)), 8 + i % 3) for i, s in enumerate(start)]
        found = {op: dict(pieces) for op, pieces in _waits(flows, iter(gaps))}
        for begin, end, op in gaps:
            idle = sum(not any(s <= t < f for s, f, _ in flows) for t in np.arange(begin, end, 1.0))
            assert sum(found[op].values()) == pytest.approx(end - begin)
            assert found[op].get(WAITING, 0.0) == pytest.approx(idle)


def test_the_command(tmp_path):
    point = {**BASE, **POINTS["ring"]}
    path = tmp_path / "p.toml"
    path.write_text("[fixed]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in point.items()))
    shown = CliRunner().invoke(main, ["run", str(path), "--breakdown"])
    assert shown.exit_code == 0
    for word in ("element-wise", "exposed, waiting for", "attention", "tp", "of step"):
        assert word in shown.stdout
    row = json.loads(CliRunner().invoke(main, ["run", str(path), "--breakdown", "--json"]).stdout)
    assert row["breakdown"]["step_s"] == pytest.approx(row["step_s"])
    assert "breakdown" not in json.loads(CliRunner().invoke(main, ["run", str(path), "--json"]).stdout)


def test_the_closed_form_has_no_operations():
    result = g5cp_vec.run({"fixed": {**BASE, "model": "llama-3.1-8b", "phase": "prefill", "n_chips": 1, "cp": 1,
                                     "seq_len": 4096, "path": "math"}})  # fmt: skip
    with pytest.raises(ConfigError, match='use path = "g5"'):
        result.breakdown()
