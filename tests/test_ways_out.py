"""A refusal says what would do: other degrees, another folder; an interruption is a line, however early it comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from commands import POINT, invoke

import g5cp_vec
from g5cp_vec.analysis.reasons import group_reasons
from g5cp_vec.cli._seam import ErrorSeam
from g5cp_vec.config._nearest import divisors, nearest
from g5cp_vec.errors import InfeasibleError

FIXED = {"chip": "h200-sxm", "topology": "flat-450", "phase": "prefill", "cp": 1, "seq_len": 8192, "n_chips": 48}


def refusal(**keys):
    with pytest.raises(InfeasibleError) as caught:
        g5cp_vec.run({"name": "p", "fixed": {"model": "llama-3.1-8b", **FIXED, **keys}})
    return str(caught.value).removeprefix("<mapping>: ")


def would_do(reason, key):
    """The values that a refusal names."""
    _, _, named = reason.partition(f"; {key} = ")
    assert named.endswith(" would do"), reason
    return [int(n) for n in named.removesuffix(" would do").split(" or ")]


# ---- degrees


def test_divisors_and_the_nearest_of_them():
    assert [divisors(n) for n in (1, 12, 36, 7)] == [[1], [1, 2, 3, 4, 6, 12], [1, 2, 3, 4, 6, 9, 12, 18, 36], [1, 7]]
    assert nearest("tp", 5, [8, 1, 4, 2]) == "; tp = 4 or 8 would do"
    assert nearest("tp", 5, [1, 2]) == "; tp = 2 would do"
    assert nearest("tp", 5, [6, 7]) == "; tp = 6 would do"
    assert nearest("tp", 5, [5]) == nearest("tp", 5, []) == ""


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"tp": 3}, "tp = 3 does not divide 32 attention heads; tp = 2 or 4 would do"),
        ({"tp": 48}, "tp = 48 does not divide 32 attention heads; tp = 16 would do"),
        # 8 key/value heads, and 32 ranks cannot be made of 48 chips.
        ({"tp": 6, "pp": 2}, "tp = 6 does not divide 32 attention heads; tp = 4 or 8 would do"),
        ({"tp": 3, "n_chips": 3}, "tp = 3 does not divide 32 attention heads; tp = 1 would do"),
        ({"model": "qwen3-235b-a22b", "n_chips": 32, "tp": 4, "ep": 3},
         "ep = 3 does not divide dp*tp = 8*4 = 32; ep = 2 or 4 would do"),
        ({"model": "qwen3-235b-a22b", "n_chips": 512, "tp": 4, "ep": 512},
         "ep = 512 does not divide 128 experts; ep = 128 would do"),
        # 48 ranks are 3 * 16: at ep = 16 and 8 an expert would be split over 3 or 6 ranks, at odds with tp = 4.
        ({"model": "qwen3-235b-a22b", "tp": 4, "ep": 48}, "ep = 48 does not divide 128 experts; ep = 4 would do"),
        ({"model": "deepseek-v3-671b", "tp": 4, "ep": 48},
         "ep = 48 does not divide 256 experts; no ep would do for 48 ranks"),
        ({"tp": 8, "n_chips": 8, "dcp": 2, "interleave": 48},
         "interleave = 48 does not divide block_size = 128; interleave = 32 or 64 would do"),
    ],
)  # fmt: skip
def test_what_does_not_divide_says_what_would(keys, reason):
    assert refusal(**keys) == reason


@pytest.mark.parametrize("tp", [3, 6, 12, 24, 48])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-235b-a22b", "gpt-oss-120b"])
def test_what_would_do_does_and_nothing_nearer(model, tp):
    keys = {"model": model, "n_chips": 48, "ep": 1}

    def is_refused(value):
        try:
            return g5cp_vec.run({"name": "p", "fixed": {**FIXED, **keys, "tp": value}}) is None
        except InfeasibleError:
            return True

    values = would_do(refusal(**keys, tp=tp), "tp")
    assert not any(is_refused(value) for value in values)
    below, above = max((v for v in values if v < tp), default=0), min((v for v in values if v > tp), default=tp)
    assert all(is_refused(value) for value in (*range(below + 1, tp), *range(tp + 1, above)))


def test_where_experts_forbid_every_degree_heads_decide():
    """80 ranks cannot share 128 experts of width 1536 at ep = 1."""
    keys = {"model": "qwen3-235b-a22b", "n_chips": 80, "ep": 1}
    assert would_do(refusal(**keys, tp=5), "tp") == [4, 8]
    assert (
        refusal(**keys, tp=4) == "moe_tp = dp*tp/ep = 80 does not divide d_expert = 1536; no ep would do for 80 ranks"
    )


def test_under_shared_contexts_layouts_are_named():
    reason = refusal(tp=12, n_chips=24, pcp=2)
    assert reason.startswith("tp = 12 does not divide 32 attention heads; nearest legal (tp, pcp, dcp): (8, 3, 1)")


def test_reasons_that_name_one_or_two_numbers_are_one():
    reasons = [("tp = 3 does not; tp = 2 or 4 would do", 1), ("tp = 9 does not; tp = 8 would do", 2)]
    assert group_reasons(reasons) == [("tp = 9 does not; tp = 8 would do (and 1 more with other numbers)", 3)]


# ---- folders


@pytest.fixture
def grid(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(POINT + "[axes]\nbatch = [1, 2]\n")
    return path


@pytest.mark.parametrize("option", [[], ["--no-resume"]])
@pytest.mark.parametrize("content", ["thesis.txt", "photos/cat.png", ".git/HEAD"])
def test_a_folder_with_other_things_is_left_alone(grid, tmp_path, content, option):
    out = tmp_path / "mine"
    (out / content).parent.mkdir(parents=True)
    (out / content).write_text("precious")
    result = invoke("sweep", grid, "-o", out, *option)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        f"error: {out}: not empty, and holds no sweep (no sweep.json); choose another -o: a new folder, or an empty one"
    )
    assert [path for path in out.rglob("*") if path.is_file()] == [out / content]


def test_empty_folders_hidden_files_and_our_own_folders_do(grid, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".DS_Store").write_text("")
    assert invoke("sweep", grid, "-o", out).exit_code == 0
    (out / "plot.svg").write_text("")
    again = invoke("sweep", grid, "-o", out)
    assert "nothing left to compute, 2 found finished" in again.stdout
    assert invoke("sweep", grid, "-o", out, "--no-resume").exit_code == 0
    assert (out / "plot.svg").exists()


@pytest.mark.parametrize("name", ["part-00000.parquet", "sweep.json"])
def test_a_file_of_a_sweep_points_to_its_folder(grid, tmp_path, name):
    out = tmp_path / "out"
    assert invoke("sweep", grid, "-o", out).exit_code == 0
    result = invoke("validate", out / name)
    assert result.exit_code == 2
    assert result.stderr == f"error: {out / name}: one file of a sweep; expected the folder that it is in: {out}\n"
    assert "sweep.json here" in invoke("validate", grid).stderr


# ---- interruptions


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("start", [["-m", "g5cp_vec"], ["-c", "from g5cp_vec.__main__ import main; main()"]])
def test_an_interruption_while_the_command_line_is_imported(tmp_path, start):
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), str(Path(g5cp_vec.__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, *start, "--help"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_an_interruption_while_words_are_read(monkeypatch):
    def interrupted(self, *rest):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(click.Group, "parse_args", interrupted)
    assert "parse_args" not in vars(ErrorSeam)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = invoke("list", "chips")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_the_module_is_the_command(tmp_path):
    done = subprocess.run([sys.executable, "-m", "g5cp_vec", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: g5cp-vec ")
