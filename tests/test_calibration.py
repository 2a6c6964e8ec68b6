"""Calibrated durations: interpolation against a slow twin, bounds, monotony, fits, hostile tables, files."""

from __future__ import annotations

import itertools
import json
import math
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
from g5cp_vec.config.calibration import AXES, Surface
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.deployment import build_deployment
from g5cp_vec.config.model import load_model
from g5cp_vec.config.topology import load_topology
from g5cp_vec.cost.calibration import (
    WORK,
    bound_seconds,
    constants_of,
    extrapolation,
    peak_times,
    place_part,
    price_part,
    surface_seconds,
)
from g5cp_vec.cost.flops import layer_parts
from g5cp_vec.cost.parts import AttentionShape, GemmShape, Part
from g5cp_vec.cost.rows import coverage, parts_by_key
from g5cp_vec.mapping.load import build_load

DATA = Path(__file__).parent / "data" / "measured"
GEMMS = DATA / "gemm_bf16_hopper.csv"
CALIBRATED = ["h100-sxm", "h200-sxm", "b200-sxm"]
SURFACES = [(name, surface) for name in CALIBRATED for surface in load_chip(name).calibration.surface]
H100 = load_chip("h100-sxm")
GEMM_H100 = H100.calibration.defaults["gemm", "bf16"]


# --- The slow twin: one point at a time, straight from the definition -------------------------------------------------


def naive_interpolation(axes, durations, point):
    """ln t is linear in ln x along each axis in turn."""

    def along(axis, offset):
        if axis == len(axes):
            return math.log(durations[offset])
        nodes, x = axes[axis], point[axis]
        if x <= nodes[0] or len(nodes) == 1:
            return along(axis + 1, offset * len(nodes))
        if x >= nodes[-1]:
            return along(axis + 1, offset * len(nodes) + len(nodes) - 1)
        right = next(i for i, node in enumerate(nodes) if node > x)
        low, high = nodes[right - 1], nodes[right]
        share = math.log(x / low) / math.log(high / low)
        below = along(axis + 1, offset * len(nodes) + right - 1)
        above = along(axis + 1, offset * len(nodes) + right)
        return below + share * (above - below)

    return math.exp(along(0, 0))


def naive_seconds(chip, surface, point):
    axes = [nodes for _, nodes in surface.axes]
    inside = [min(max(x, nodes[0]), nodes[-1]) for x, nodes in zip(point, axes, strict=True)]
    seconds = naive_interpolation(axes, surface.duration_s, inside)
    constants = dict(surface.constants)
    link = constants.get("link_gigabytes_per_second")
    bandwidth = chip.hbm_bandwidth_bytes_per_s if link is None else link * 1e9

    def form(at):
        flops, n = WORK[surface.kind](constants, *at)
        a = flops / chip.peak(surface.arithmetic_dtype) / surface.arithmetic_efficiency
        b = n / bandwidth / surface.memory_efficiency
        return surface.overhead_s + (a**3 + b**3) ** (1 / 3)

    return seconds * form(point) / form(inside)


def points_of(surface):
    """Coordinates up to 64 times outside the nodes."""
    axes = []
    for name, nodes in surface.axes:
        low = 2.0 if name == "group" else nodes[0] / 64
        axes.append(st.floats(math.log(low), math.log(nodes[-1] * 64)).map(math.exp) | st.sampled_from(nodes))
    return st.tuples(*axes)


cases = st.sampled_from(SURFACES).flatmap(
    lambda case: st.tuples(st.just(case), st.lists(points_of(case[1]), min_size=1))
)


@given(cases)
def test_surfaces_equal_the_twin_and_stay_above_the_roofline(case):
    (name, surface), points = case
    chip = load_chip(name)
    coordinates = [np.array(column) for column in zip(*points, strict=True)]
    seconds = surface_seconds(chip, surface, coordinates)
    bound = bound_seconds(surface, *peak_times(chip, surface, coordinates), coordinates)
    assert (seconds >= bound).all()
    expected = [naive_seconds(chip, surface, point) for point in points]
    np.testing.assert_allclose(seconds, np.maximum(expected, bound), rtol=1e-9)


@given(cases, st.floats(1.0, 64.0))
def test_longer_takes_no_less(case, factor):
    (name, surface), points = case
    lengths = [i for i, axis in enumerate(AXES[surface.kind]) if axis in ("length", "context")]
    for axis in lengths:
        short = [np.array(column) for column in zip(*points, strict=True)]
        long = [column * factor if i == axis else column for i, column in enumerate(short)]
        before, after = (surface_seconds(load_chip(name), surface, at) for at in (short, long))
        assert (after >= before * (1 - 1e-12)).all()


@pytest.mark.parametrize("name", CALIBRATED)
def test_nodes_are_reproduced(name):
    chip = load_chip(name)
    for surface in chip.calibration.surface:
        nodes = np.array(list(itertools.product(*(nodes for _, nodes in surface.axes)))).T
        bound = bound_seconds(surface, *peak_times(chip, surface, nodes), nodes)
        np.testing.assert_allclose(
            surface_seconds(chip, surface, nodes), np.maximum(surface.duration_s, bound), rtol=1e-12
        )
        assert (extrapolation(surface, nodes) == 1).all()


PREFILLS = [case for case in SURFACES if case[1].kind.endswith("_prefill")]


@pytest.mark.parametrize(("name", "surface"), PREFILLS)
def test_efficiency_settles_beyond_the_table(name, surface):
    """Up to a million tokens it grows a little, as the overhead fades, and never falls."""
    chip = load_chip(name)
    length = np.array([surface.limits[0][1], 2**16, 2**18, 2**20], float)
    seconds = surface_seconds(chip, surface, (length, 32.0))
    efficiency = peak_times(chip, surface, (length, 32.0))[0] / seconds
    assert (np.diff(efficiency) >= -1e-12).all()
    assert efficiency[-1] <= min(1.0, 1.25 * efficiency[0])
    np.testing.assert_allclose(extrapolation(surface, (length, 32.0)), length / length[0])


# --- Parts of a simulation -------------------------------------------------------------------------------------------


def prefill_part(q, kv, pairs, heads=32, batch=1):
    shape = AttentionShape("prefill", batch, q, kv, pairs, heads, heads // 8, 128, 128, False, "bf16")
    flops = 4 * batch * heads * 128 * pairs
    return Part("attention", "attention", flops, 4 * batch * heads * 128 * (q + kv), "bf16", shape)


def test_a_causal_square_is_where_it_was_measured():
    place = place_part(H100.calibration, 4096, prefill_part(8192, 8192, 8192 * 8192 / 2))
    assert place.coordinates == (8192, 32)


@given(st.integers(1, 2**17), st.integers(1, 2**20), st.floats(0.01, 1.0), st.integers(1, 8))
def test_a_rectangle_keeps_its_rows_and_its_flops(q, kv, kept, batch):
    pairs = max(1.0, q * kv * kept)
    part = prefill_part(q, kv, pairs, batch=batch)
    place = place_part(H100.calibration, 4096, part)
    length, heads = place.coordinates
    assert length * heads == pytest.approx(batch * 32 * q)
    flops, _ = WORK["attention_prefill"](place.surface.numbers, length, heads)
    assert flops == pytest.approx(part.flops)
    assert price_part(H100, 4096, part).seconds >= part.flops / H100.peak("bf16")


def test_a_gemm_is_its_node():
    for m, n, k in [(2048, 4096, 4096), (1, 10240, 8192)]:
        part = Part("qkv", "gemm", 2 * m * n * k, 2 * (m * k + n * k + m * n), "bf16", GemmShape(m, k, n))
        node = dict(zip(itertools.product(*(nodes for _, nodes in GEMM_H100.axes)), GEMM_H100.duration_s, strict=True))
        assert price_part(H100, 4096, part).seconds == pytest.approx(node[m, n, k], rel=1e-12)


def deploy(model="deepseek-v3-671b", **keys):
    fixed = {
        "chip": H100,
        "topology": load_topology("hgx-8"),
        "phase": "prefill",
        "n_chips": 8,
        "tp": 8,
        "cp": 1,
        "ep": 8,
    }
    return build_deployment({**fixed, "model": load_model(model), **keys})


def test_experts_are_priced_as_they_were_measured():
    """tp 1, ep 1, all 256 experts: gate, activation and down of 4096 tokens are the measured network's three parts."""
    dep = deploy(n_chips=1, tp=1, ep=1)
    load = build_load(dep, 4096, 1, 0)
    kind = next(kind for kind in dep.model.kinds[0] if kind.ffn == "moe")
    parts = layer_parts(dep, load, kind)["experts"]
    surface = H100.calibration.defaults["moe", "fp8"]
    seconds = sum(price_part(H100, dep.model.hidden, part).seconds for part in parts if part.shape is not None)
    measured = surface_seconds(H100, surface, (4096 * 8 / 256, 256.0, 2048.0))
    assert seconds == pytest.approx(float(measured), rel=1e-9)


def test_what_was_not_measured_is_said():
    point = {
        "model": "qwen3-235b-a22b", "chip": "h100-sxm", "topology": "hgx-8", "n_chips": 8, "tp": 8, "ep": 8, "cp": 1,
        "phase": "prefill", "seq_len": 8192, "dtype": "bf16",
    }  # fmt: skip
    row = g5cp_vec.run({"fixed": point})
    assert (row.calibrated, row.uncalibrated_parts) == (False, "experts")
    assert row.extrapolated >= 1
    row = g5cp_vec.run({"fixed": {**point, "model": "deepseek-v3-671b", "dtype": "fp8"}})
    assert (row.calibrated, row.uncalibrated_parts) == (True, None)
    row = g5cp_vec.run({"fixed": {**point, "chip": "sg2262"}})
    assert (row.calibrated, row.uncalibrated_parts, row.extrapolated) == (False, None, None)


def test_extrapolation_is_the_largest_ratio():
    dep = deploy("llama-3.1-8b", n_chips=1, tp=1)
    load = build_load(dep, np.array([2**14, 2**20]), np.ones(2, np.int64), np.zeros(2, np.int64))
    covered = coverage(dep, load, 2)
    assert covered.uncalibrated == ()
    # A million tokens: 64 times the longest prefill, 32 times the most rows of a GEMM.
    np.testing.assert_allclose(covered.extrapolated[1], 64)
    assert covered.extrapolated[0] < 2


def test_pricing_does_not_depend_on_company():
    dep = deploy()
    seq_len = np.array([8192, 2**17, 2**20])
    many = parts_by_key(dep, build_load(dep, seq_len, np.ones(3, np.int64), np.zeros(3, np.int64)))
    for i, length in enumerate(seq_len):
        one = parts_by_key(dep, build_load(dep, int(length), 1, 0))
        for key, parts in many.items():
            for together, alone in zip(parts, one[key], strict=True):
                a, b = (price_part(H100, dep.model.hidden, part) for part in (together, alone))
                assert np.broadcast_to(a.seconds, 3)[i] == pytest.approx(float(b.seconds), rel=1e-12)


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
    "binary": (b"\xff\xfe\x00", "not a CSV file"),
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
        (["nowhere.csv", "--chip", "h100-sxm", "--evaluate"], "nowhere.csv: cannot be read"),
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
