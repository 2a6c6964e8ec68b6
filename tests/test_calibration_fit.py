"""Fits of measured kernels: held-out rows, outliers, hostile tables, chip files."""

from __future__ import annotations

import itertools
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import g5cp_vec
from g5cp_vec.calibration.fit import Machine, choose_defaults, fit_rows, refined
from g5cp_vec.calibration.gaussian import Inputs, _objective, condition
from g5cp_vec.calibration.tables import read_tables
from g5cp_vec.cli import main
from g5cp_vec.config.calibration import Surface
from g5cp_vec.config.chip import load_chip
from g5cp_vec.cost.calibration import (
    constants_of,
    surface_seconds,
)

DATA = Path(__file__).parent / "data" / "measured"
GEMMS = DATA / "gemm_bf16_hopper.csv"
CALIBRATED = ["h100-sxm", "h200-sxm", "b200-sxm"]
H100 = load_chip("h100-sxm")


# --- The fit ---------------------------------------------------------------------------------------------------------


def machines():
    return {name.replace("-", "_"): Machine.of(load_chip(name)) for name in CALIBRATED}


def test_held_out_rows_are_predicted():
    """The bound is what a few dozen rows of two chips allow; the shipped presets rest on many more."""
    fitted = fit_rows(read_tables([GEMMS]), machines(), "h200_sxm")
    (judged,) = fitted.judged
    long = np.array([row.seconds > 20e-6 for row in judged.rows])
    assert len(judged.rows) == 26
    assert np.median(judged.error[long]) < 0.06
    assert np.quantile(judged.error[long], 0.9) < 0.20
    (surface,) = fitted.surfaces
    assert (surface.n_rows, surface.arithmetic_dtype) == (26, "bf16")
    # Rows that were used are met more closely still.
    errors = []
    for row in judged.rows:
        errors.append(abs(surface_seconds(load_chip("h200-sxm"), surface, row.place) / row.seconds - 1))
    assert np.median(errors) < 0.03


def test_a_wild_row_does_not_bend_its_neighbours():
    rows = read_tables([GEMMS])
    clean = fit_rows(rows, machines(), "h200_sxm").surfaces[0]
    wild = next(i for i, row in enumerate(rows) if row.system == "h200_sxm" and row.place == (2048, 4096, 4096))
    rows[wild] = rows[wild]._replace(seconds=10 * rows[wild].seconds)
    bent = fit_rows(rows, machines(), "h200_sxm").surfaces[0]
    assert np.median(np.abs(np.array(bent.duration_s) / clean.duration_s - 1)) < 0.05


def test_gradient_of_the_likelihood():
    rng = np.random.default_rng(1)
    inputs = Inputs(rng.normal(size=(12, 2)), rng.integers(0, 3, (12, 2)))
    target, extra = rng.normal(size=12) / 5, np.zeros(12)
    at = rng.normal(size=3 + 4 + 2) / 3
    _, gradient = _objective(at, inputs, target, extra)
    for i in range(len(at)):
        step = np.zeros(len(at))
        step[i] = 1e-6
        numeric = (
            _objective(at + step, inputs, target, extra)[0] - _objective(at - step, inputs, target, extra)[0]
        ) / 2e-6
        assert gradient[i] == pytest.approx(numeric, rel=1e-4, abs=1e-6)


def test_a_process_passes_through_exact_rows():
    sizes = np.arange(6.0)[:, None]
    inputs = Inputs(sizes, np.zeros((6, 0), np.int64))
    target = np.array([0.1, 0.12, 0.15, 0.1, 0.08, 0.1])
    exact = np.concatenate([[np.log(0.1), np.log(0.1), -8.0], [0.0]])
    np.testing.assert_allclose(condition(exact, inputs, target).predict(inputs), target, atol=1e-4)


def test_nodes_are_at_most_twice_apart():
    assert refined([1, 16, 20]) == [1, 2, 4, 8, 16, 20]
    assert refined([7]) == [7]
    nodes = refined([3.0, 1000.0])
    assert all(b / a <= 2 + 1e-6 for a, b in itertools.pairwise(nodes))


def test_the_fastest_well_covered_library_is_the_default():
    def surface(library, seconds, n_rows):
        return Surface(
            kind="gemm", library=library, arithmetic_dtype="bf16", constants=constants_of("gemm", element_bits=16),
            axes=(("m", (1.0,)), ("n", (1.0,)), ("k", (1.0,))), duration_s=(seconds,), overhead_s=1e-6,
            arithmetic_efficiency=0.5, memory_efficiency=0.5, n_rows=n_rows,
        )  # fmt: skip

    surfaces = [surface("slow", 3e-6, 20), surface("fast", 2e-6, 10), surface("thin", 1e-6, 9)]
    chosen = choose_defaults(surfaces, {s.variant: "bf16" for s in surfaces})
    assert [s.default_for for s in chosen] == ["", "bf16", ""]


# --- Tables and files ------------------------------------------------------------------------------------------------

HEAD = "m,n,k,gemm_dtype,latency_ms\n"
ROW = "2048,4096,4096,bfloat16,0.09\n"
HOSTILE = {
    "empty file": ("", "expected one column of times"),
    "no rows": (HEAD, "no rows below the header"),
    "missing column": ("m,n,gemm_dtype,latency_ms\n2048,4096,bfloat16,1\n", "nearest is gemm, which lacks k"),
    "unknown kind": ("colour,latency_ms\nred,1\n", "no known kind of table"),
    "NaN": (HEAD + "2048,4096,4096,bfloat16,nan\n", ":2: latency_ms: expected a number > 0, got 'nan'"),
    "negative": (HEAD + "-1,4096,4096,bfloat16,1\n", ":2: m: expected a number > 0, got '-1'"),
    "zero time": (HEAD + ROW + "2048,4096,4096,bfloat16,0\n", ":3: latency_ms: expected a number > 0"),
    "text": (HEAD + "many,4096,4096,bfloat16,1\n", ":2: m: expected a number > 0, got 'many'"),
    "dtype": (HEAD + "1,1,1,bfloat61,1\n", ":2: gemm_dtype: expected one of bfloat16"),
    "ragged": (HEAD + "1,2,3\n", ":2: a row with more or fewer cells"),
    "mixed units": ("m,n,k,gemm_dtype,latency_ms,latency_us\n1,1,1,bf16,1,1000\n", "got latency_ms and latency_us"),
    "twice": ("m,m,n,k,gemm_dtype,latency_ms\n1,1,1,1,bf16,1\n", "column 'm' stands twice"),
    "wrong chip": ("system," + HEAD + "gb999," + ROW, "no row of 'h100_sxm' in the tables, they hold gb999"),
    "binary": (b"\xff\xfe\x00", "expected a CSV file"),
    "group of one": ("num_gpus,bytes_total,latency_us\n1,1024,5\n", "num_gpus: expected 2 or more"),
}


@pytest.mark.parametrize(("text", "said"), HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("how", [["--evaluate"], ["-o", "out.toml"]], ids=["evaluate", "fit"])
def test_hostile_tables_are_one_line(tmp_path, monkeypatch, text, said, how):
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    result = CliRunner().invoke(main, ["calibrate", "t.csv", "--chip", "h100-sxm", *how])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("out.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.csv", "--chip", "h100-sxm", "--evaluate"], "nowhere.csv: no such file"),
        ([str(GEMMS), "--chip", "h100-sxm"], "-o: missing"),
        ([str(GEMMS), "--chip", "h100-sxm", "--evaluate", "-o", "x.toml"], "-o: nothing is fitted"),
        ([str(GEMMS), "--chip", "h100-sxm", "-o", "x.toml", "--csv"], "only with --evaluate"),
        ([str(GEMMS), "--chip", "sg2262", "--system", "h100_sxm", "--evaluate"], "has no [calibration]"),
        ([str(GEMMS), "--chip", "h100-sx", "--evaluate"], "did you mean 'h100-sxm'"),
    ],
)
def test_hostile_options_are_one_line(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["calibrate", *arguments])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


def test_evaluation_of_the_presets():
    result = CliRunner().invoke(main, ["calibrate", str(GEMMS), "--chip", "h100-sxm", "--evaluate", "--json"])
    answer = json.loads(result.stdout)
    (summary,) = answer["summary"]
    assert (summary["rows"], summary["unpredicted"], summary["extrapolated"]) == (20, 0, 0)
    assert summary["long_median"] < 0.06
    row = answer["rows"][0]
    assert row["surface"] == "own"
    assert row["error"] == pytest.approx(row["predicted_us"] / row["measured_us"] - 1)
    as_csv = CliRunner().invoke(main, ["calibrate", str(GEMMS), "--chip", "h100-sxm", "--evaluate", "--csv"]).stdout
    assert len(as_csv.splitlines()) == 21


def test_another_library_is_predicted_by_the_default(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("library," + HEAD + "mine," + ROW)
    result = CliRunner().invoke(main, ["calibrate", str(table), "--chip", "h100-sxm", "--evaluate", "--json"])
    assert json.loads(result.stdout)["rows"][0]["surface"] == "default"


FIVE = HEAD + "".join(
    f"{m},{n},4096,bfloat16,{2e3 * m * n * 4096 / 393.2e12 / 0.5 + 0.01}\n"
    for m, n in [(128, 4096), (1024, 4096), (1024, 8192), (4096, 8192), (8192, 8192)]
)


def test_five_rows_of_a_chip_of_ones_own(tmp_path, monkeypatch):
    """Half of the peak and 10 us: the fit finds both where it saw them, and stays near half of the peak beyond."""
    monkeypatch.chdir(tmp_path)
    Path("five.csv").write_text(FIVE)
    result = CliRunner().invoke(
        main, ["calibrate", "five.csv", "--chip", "sg2262", "-o", "mine.toml", "--source", "me"]
    )
    assert result.exit_code == 0, result.stderr
    chip = load_chip("mine.toml")
    # Each row was predicted from the four others.
    assert all(surface.median_error is not None for surface in chip.calibration.surface)
    assert chip.calibrated
    assert chip.calibration.source == "me"
    surface = chip.calibration.defaults["gemm", "bf16"]
    for m, n in [(128, 4096), (1024, 8192), (2048, 8192), (8192, 8192)]:
        expected = 2.0 * m * n * 4096 / 393.2e12 / 0.5 + 1e-5
        assert surface_seconds(chip, surface, (m, n, 4096)) == pytest.approx(expected, rel=0.1)
    far = surface_seconds(chip, surface, (2**20, 8192, 4096))
    assert 0.4 < 2.0 * 2**20 * 8192 * 4096 / 393.2e12 / far < 0.65


def test_a_written_chip_is_read_back_and_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("five.csv").write_text(FIVE)
    command = ["calibrate", "five.csv", "--chip", "h100-sxm", "-o", "mine.toml"]
    assert CliRunner().invoke(main, command).exit_code == 0
    mine = load_chip("mine.toml")
    # The user's own library has taken the default's place, everything else is the preset's.
    assert mine.calibration.defaults["gemm", "bf16"].library == "user"
    assert len(mine.calibration.surface) == len(H100.calibration.surface) + 1
    assert mine.model_copy(update={"calibration": None}) == H100.model_copy(update={"calibration": None})
    other = {k: v for k, v in mine.calibration.defaults.items() if k != ("gemm", "bf16")}
    assert other == {k: v for k, v in H100.calibration.defaults.items() if k != ("gemm", "bf16")}
    point = {"model": "llama-3.1-8b", "chip": "mine.toml", "topology": "hgx-8", "n_chips": 1, "cp": 1}
    assert g5cp_vec.run({"fixed": {**point, "phase": "prefill", "seq_len": 4096}}).calibrated is True
    # Calibrating its own file again changes nothing but what is fitted anew.
    assert CliRunner().invoke(main, ["calibrate", "five.csv", "--chip", "mine.toml", "-o", "mine.toml"]).exit_code == 0
    assert load_chip("mine.toml").calibration.surface == mine.calibration.surface


def test_a_calibration_in_the_middle_of_a_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("five.csv").write_text(FIVE)
    Path("odd.toml").write_text(
        "hbm_gbytes = 80\nhbm_bandwidth_gbytes_per_s = 3350\n"
        '[calibration]\nsource = "me"\nfitted = "today"\ntables = []\nsurface = []\n[peak_tflops]\nbf16 = 300\n'
    )
    result = CliRunner().invoke(main, ["calibrate", "five.csv", "--chip", "odd.toml", "-o", "x.toml"])
    assert result.exit_code == 2
    assert "move it to the end" in result.stderr


@pytest.mark.parametrize("name", CALIBRATED)
def test_presets_name_their_source_and_stay_small(name):
    path = Path(g5cp_vec.__file__).parent / "config" / "presets" / "chips" / f"{name}.toml"
    assert path.stat().st_size < 300_000
    table = tomllib.loads(path.read_text())["calibration"]
    assert all(word in table["source"] for word in ("AIConfigurator", "Apache-2.0"))
    kinds = {kind for kind, _ in load_chip(name).calibration.defaults}
    assert kinds >= {"gemm", "attention_prefill", "mla_prefill", "attention_decode", "mla_decode", "moe"}


@settings(max_examples=20)
@given(st.sampled_from(["kind", "axes", "duration_us", "constants", "library", "overhead_us"]))
def test_a_damaged_surface_is_one_line(key):
    from g5cp_vec.config._files import read_record
    from g5cp_vec.config.chip import Chip
    from g5cp_vec.errors import ConfigError

    path = Path(g5cp_vec.__file__).parent / "config" / "presets" / "chips" / "h100-sxm.toml"
    table = tomllib.loads(path.read_text())
    table["calibration"]["surface"] = table["calibration"]["surface"][:1]
    table["calibration"]["surface"][0][key] = -1
    with pytest.raises(ConfigError) as error:
        read_record(Chip, path, table)
    assert all(f"calibration.surface[0].{key}" in line for line in error.value.lines)
