"""accuracy: what ships is fully stated, recomputed and summed up; and the study's targets on the rows that ship."""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys

import pytest
from click.testing import CliRunner

import g5cp_vec
from g5cp_vec.analysis.accuracy import OTHER_READING, PUBLISHED, ROLES, measure_accuracy, summarise
from g5cp_vec.cli import main
from g5cp_vec.errors import ConfigError

STUDY = {"model": "llama-3.1-405b", "dtype": "bf16", "ffn_dtype": "fp8", "chip": "h100-96gb-500w",
         "topology": "gtt-hgx-8", "tp": 8}  # fmt: skip


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    picture = tmp_path_factory.mktemp("accuracy") / "a.svg"
    result = CliRunner().invoke(main, ["accuracy", "--json", "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), picture.read_text(encoding="utf-8")


def test_every_row_is_fully_stated():
    for path in PUBLISHED.glob("*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for name in (
                    "source",
                    "where",
                    "quantity",
                    "per",
                    "measured",
                    "provenance",
                    "chip",
                    "topology",
                    "model",
                ):
                    assert row[name], (path, name)
                assert row["role"] in ROLES
                assert row["role"] != OTHER_READING or row["reading"]


def test_errors_and_their_summary(printed):
    rows = printed[0]["measurements"]
    assert len(rows) == sum(len(path.read_text().splitlines()) - 1 for path in PUBLISHED.glob("*.csv"))
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1, rel=1e-12)
    for group in printed[0]["summary"]:
        errors = [abs(r["error"]) for r in rows if all(r[key] == group[key] for key in ("source", "quantity", "role"))]
        assert group["n"] == len(errors)
        assert group["mean"] == pytest.approx(statistics.fmean(errors))
        assert group["median"] == pytest.approx(statistics.median(errors))
        assert group["largest"] == max(errors)
    assert not any(group["role"] == OTHER_READING for group in printed[0]["summary"])


def test_rows_of_the_study_are_met(printed):
    for row in printed[0]["measurements"]:
        if row["source"] == "arXiv:2411.01783" and row["role"] != OTHER_READING:
            assert abs(row["error"]) < 0.05, row


def test_every_reading_is_shown(printed):
    rows = [r for r in printed[0]["measurements"] if r["quantity"] == "model_flops"]
    assert [r["reading"] for r in rows] == ["1M = 1000000", "1M = 1048576"]


def test_the_picture(printed, tmp_path):
    assert printed[1].startswith("<svg")
    for text in ("measured, s", "predicted, s", "fitted", "time to first token"):
        assert text in printed[1]
    refused = CliRunner().invoke(main, ["accuracy", "--plot", str(tmp_path / "a.pdf")])
    assert refused.exit_code == 2
    assert "expected a file ending in .svg or .png" in refused.output
    nowhere = CliRunner().invoke(main, ["accuracy", "--plot", str(tmp_path / "no" / "a.svg")])
    assert nowhere.exit_code == 2
    assert "cannot be written" in nowhere.output


def test_a_picture_that_cannot_be_drawn_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("g5cp_vec.analysis.accuracy.measure_accuracy", lambda: pytest.fail("computed first"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused = CliRunner().invoke(main, ["accuracy", "--plot", str(tmp_path / "a.svg")])
    assert refused.exit_code == 2
    assert refused.output.startswith("error: --plot: needs altair and vl-convert-python: pip install '.[plot]'")


def test_the_table(monkeypatch, tmp_path):
    name = "llama3_405b_context_parallel.csv"
    (tmp_path / name).write_text((PUBLISHED / name).read_text())
    monkeypatch.setattr("g5cp_vec.analysis.accuracy.measure_accuracy", lambda: measure_accuracy(tmp_path))
    shown = CliRunner().invoke(main, ["accuracy"]).stdout
    for text in ("arXiv:2411.01783", "Table 6", "other reading", "mean error"):
        assert text in shown


HEAD = "source,where,phase,model,chip,topology,n_chips,tp,cp,seq_len,quantity,per,measured,role,reading,provenance,note"
ROW = "s,w,prefill,llama-3.1-8b,h200-sxm,flat-450,1,1,1,4096,ttft_s,1,0.1,predicted,,p,"


@pytest.mark.parametrize(
    ("head", "row", "message"),
    [
        (HEAD, ROW.replace("predicted", "known"), "line 2: role: expected one of fitted, predicted, other reading"),
        (HEAD, ROW.replace("0.1", "fast"), "line 2: per, measured, concurrency, output_tokens, n_requests"),
        (HEAD, ROW.replace("ttft_s", "tpot_s"), "line 2: quantity: expected a column that this point has"),
        (HEAD.replace("seq_len", "seqlen"), ROW, "unknown key 'seqlen'; did you mean 'seq_len'?"),
        (HEAD, ROW + ",more", "line 2: expected as many values as there are columns"),
        (HEAD, ROW.replace("llama-3.1-8b", "llama-9"), "unknown model 'llama-9'"),
    ],
)
def test_hostile_rows(head, row, message, tmp_path):
    (tmp_path / "a.csv").write_text(f"{head}\n{row}\n")
    with pytest.raises(ConfigError) as refused:
        measure_accuracy(tmp_path)
    assert message in str(refused.value)


def test_own_rows(tmp_path):
    (tmp_path / "a.csv").write_text(f"{HEAD}\n{ROW}\n")
    (m,) = measure_accuracy(tmp_path)
    point = {"phase": "prefill", "model": "llama-3.1-8b", "chip": "h200-sxm", "topology": "flat-450", "n_chips": 1,
             "tp": 1, "cp": 1, "seq_len": 4096}  # fmt: skip
    assert m.predicted == g5cp_vec.run({"fixed": point}).ttft_s
    assert summarise([m])[0].mean == abs(m.error)


def test_nothing_is_drawn_with_before_it_is_asked_for():
    code = "import sys, g5cp_vec.cli, g5cp_vec.analysis.accuracy; assert 'altair' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_both_clusters_of_the_study_bring_their_runtime():
    for topology in ("gtt-hgx-8", "gti-hgx-8"):
        result = g5cp_vec.run({"fixed": {**STUDY, "topology": topology, "phase": "prefill", "n_chips": 16, "cp": 2,
                                         "seq_len": 8192}})  # fmt: skip
        assert result.runtime == "meta-cp-study"
        assert result.calibrated


def test_ring_idle_is_what_is_left_of_near_perfect_scaling():
    """TTFT beyond TP8 / N is 0.4 to 0.7 ms per ring step where the ring hides its transfers (32K to 128K)."""
    for seq_len in (32768, 131072):
        times = {}
        for cp in (1, 8, 16):
            point = {**STUDY, "phase": "prefill", "n_chips": 8 * cp, "cp": cp, "seq_len": seq_len}
            times[cp] = g5cp_vec.run({"fixed": point}).ttft_s
        for cp in (8, 16):
            assert 0.4e-3 < (times[cp] - times[1] / cp) / (126 * cp) < 0.7e-3


def test_a_served_quantity_needs_its_users(tmp_path):
    row = ROW.replace("ttft_s", "served_ttft_s")
    (tmp_path / "a.csv").write_text(f"{HEAD}\n{row}\n")
    with pytest.raises(ConfigError, match="concurrency, output_tokens, n_requests, shortest, wait_steps: missing"):
        measure_accuracy(tmp_path)
    asked = "concurrency,output_tokens,n_requests,shortest,wait_steps"
    (tmp_path / "a.csv").write_text(f"{HEAD},{asked}\n{row},2,1024,20,0.8,0\n")
    (m,) = measure_accuracy(tmp_path)
    assert list(m.asked.values()) == [2, 1024, 20, 0.8, 0]
    assert m.predicted > 0
    (tmp_path / "a.csv").write_text(f"{HEAD},{asked},poll_steps\n{row},2,1024,20,0.8,0,10\n")
    assert measure_accuracy(tmp_path)[0].predicted > m.predicted
    (tmp_path / "a.csv").write_text(f"{HEAD},{asked},poll_steps\n{row},2,1024,20,0.8,0,0\n")
    with pytest.raises(ConfigError, match="line 2: poll_steps: expected at least 1, got 0"):
        measure_accuracy(tmp_path)
