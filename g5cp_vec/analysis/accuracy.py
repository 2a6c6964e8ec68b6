"""Predicted against measured: every published measurement that ships with the package, recomputed.

A measurement is a row of a CSV file in ``g5cp_vec/data/published``: the keys of a point, which quantity was measured
and how large it is, where it was published, and its role. ``fitted``: a parameter of a shipped chip, topology or
runtime was fitted to it, so it shows how well the model describes what it knows. ``predicted``: nothing was. ``other
reading``: the same measurement under another reading of what the source leaves open; it is shown and enters no mean.
"""

from __future__ import annotations

import csv
import importlib.util
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from g5cp_vec.analysis.served import predict_served
from g5cp_vec.analysis.serving import Client, Served
from g5cp_vec.config._files import unknown_key
from g5cp_vec.config._keys import KEYS
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import Expansion
from g5cp_vec.config.grid import load_grid
from g5cp_vec.cost.model_flops import model_flops
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.load import build_load
from g5cp_vec.runner.api import run_sweep

PUBLISHED = Path(__file__).parent.parent / "data" / "published"
FITTED, PREDICTED, OTHER_READING = "fitted", "predicted", "other reading"
ROLES = (FITTED, PREDICTED, OTHER_READING)
_ABOUT = (
    "source", "where", "quantity", "per", "measured", "role", "reading", "provenance", "note",
)  # fmt: skip
# How a server was asked: columns of the rows about one.
_NEEDED = {"concurrency": int, "output_tokens": int, "n_requests": int, "shortest": float, "wait_steps": int}
# May be left out: an engine that is not told otherwise looks for prompts before every step.
_POLL = "poll_steps"
_ASKED = {**_NEEDED, _POLL: int}
# What users of a server see: column -> field of the prediction.
_SERVED = {"served_ttft_s": "ttft_s", "served_tpot_s": "tpot_s"}
_FLOPS = "model_flops"


@dataclass(frozen=True, slots=True)
class Measurement:
    """A published measurement and what the package says of it.

    Attributes
    ----------
    source, where : str
        Publication, and the place in it.
    point : dict
        Keys of the point that it is about.
    quantity : str
        Column of a result, ``"model_flops"``, or ``"served_ttft_s"`` or ``"served_tpot_s"``: what each of
        the users of a server sees (:mod:`g5cp_vec.analysis.served`).
    per : int
        What the column is divided by to be the measured quantity, such as the ring steps of a pass.
    measured : float
        In SI units.
    role : {"fitted", "predicted", "other reading"}
    reading : str
        What is assumed where the source leaves a choice.
    provenance, note : str
    asked : dict
        Of a server: users (``concurrency``), most tokens of an answer (``output_tokens``), requests in all
        (``n_requests``), shortest length as a share of the longest (``shortest``), decode steps for which the engine
        holds a prompt back (``wait_steps``), and from one look for prompts to the next (``poll_steps``, if given); else
        empty.
    predicted : float
    """

    source: str
    where: str
    point: dict[str, Any]
    quantity: str
    per: int
    measured: float
    role: str
    reading: str
    provenance: str
    note: str
    asked: dict[str, Any]
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, with the error."""
        return {**asdict(self), "error": self.error}


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of the measurements of one quantity from one source.

    Attributes
    ----------
    source, quantity, role : str
    n : int
    mean, median, largest : float
        Of the absolute errors.
    """

    source: str
    quantity: str
    role: str
    n: int
    mean: float
    median: float
    largest: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def measure_accuracy(folder: Path = PUBLISHED) -> list[Measurement]:
    """Recompute every measurement in a folder's CSV files.

    Raises
    ------
    ConfigError
        A row is not what it should be; the message names the file and the line.
    """
    served: dict[Any, Served] = {}
    return [_recompute(path, line, row, served) for path in sorted(folder.glob("*.csv")) for line, row in _rows(path)]


def summarise(measurements: list[Measurement]) -> list[Summary]:
    """Return the errors by source, quantity and role, in order of appearance; other readings are left out."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for m in measurements:
        if m.role != OTHER_READING:
            groups.setdefault((m.source, m.quantity, m.role), []).append(abs(m.error))
    return [
        Summary(*key, len(errors), statistics.fmean(errors), statistics.median(errors), max(errors))
        for key, errors in groups.items()
    ]


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(enumerate(csv.DictReader(file), start=2))


def _recompute(path: Path, line: int, row: Mapping[str, str], served: dict[Any, Served]) -> Measurement:
    place = f"{path}: line {line}"
    about = {name: row.get(name) or "" for name in _ABOUT}
    point = {key: text for key, text in row.items() if key not in _ABOUT and key not in _ASKED and text}
    if None in row or None in row.values():
        raise ConfigError(f"{place}: expected as many values as there are columns")
    for key in point:
        if key not in KEYS:
            raise ConfigError(f"{place}: {unknown_key(key, (*KEYS, *_ABOUT, *_ASKED))}")
    if about["role"] not in ROLES:
        raise ConfigError(f"{place}: role: expected one of {', '.join(ROLES)}, got {about['role']!r}")
    try:
        per, measured = int(about.pop("per")), float(about.pop("measured"))
        asked = {name: read(row[name]) for name, read in _ASKED.items() if row.get(name)}
    except ValueError as error:
        raise ConfigError(f"{place}: per, measured, {', '.join(_ASKED)}: expected numbers, {error}") from None
    typed = {key: _typed(key, text) for key, text in point.items()}
    if about["quantity"] in _SERVED:
        missing = [name for name in _NEEDED if name not in asked]
        if missing:
            raise ConfigError(f"{place}: {', '.join(missing)}: missing, {about['quantity']} needs {', '.join(_NEEDED)}")
        if asked.get(_POLL, 1) < 1:
            raise ConfigError(f"{place}: {_POLL}: expected at least 1, got {asked[_POLL]}")
        predicted = _predict_served(typed, about["quantity"], asked, served, place)
    else:
        predicted = _predict(typed, about["quantity"], place) / per
    return Measurement(
        point=typed,
        per=per,
        measured=measured,
        asked=asked,
        predicted=predicted,
        **about,
    )


def _typed(key: str, text: str) -> Any:
    """Return a value as a grid file would have it."""
    return int(text) if KEYS[key].least is not None and text.isdecimal() else text


def _predict_served(
    point: Mapping[str, Any], quantity: str, asked: Mapping[str, Any], served: dict[Any, Served], place: str
) -> float:
    """Return what users see; rows of one setting share the prediction."""
    setting = {key: value for key, value in point.items() if key not in ("phase", "seq_len", "batch")}
    key = (*sorted(setting.items()), point["seq_len"], *sorted(asked.items()))
    if key not in served:
        client = Client(
            asked["concurrency"], point["seq_len"], asked["output_tokens"], asked["n_requests"], asked["shortest"]
        )
        served[key] = predict_served(setting, client, asked["wait_steps"], asked.get(_POLL, 1), place)
    return float(getattr(served[key], _SERVED[quantity]))


def _predict(point: Mapping[str, Any], quantity: str, place: str) -> float:
    grid = load_grid({"name": place, "fixed": dict(point), "points": {"on_invalid": "error"}})
    if quantity == _FLOPS:
        return _flops(grid.expand())
    value = run_sweep(grid, audit="none").row(0, named=True).get(quantity)
    if not isinstance(value, float):
        raise ConfigError(f"{place}: quantity: expected a column that this point has, or {_FLOPS}, got {quantity!r}")
    return value


def _flops(expansion: Expansion) -> float:
    """Return the FLOPs that the model needs for a point."""
    dep = expansion.deployments[0]
    assert isinstance(dep, Deployment)
    load = (int(getattr(expansion, name)[0]) for name in ("seq_len", "batch", "cached_tokens"))
    return float(sum(model_flops(dep, build_load(dep, *load)).values()))


def check_plottable(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is computed for it.

    Raises
    ------
    ConfigError
        The file's ending or its folder is wrong, or what draws pictures is not installed.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot: {path}: expected a file ending in .svg or .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: {path}: cannot be written: no folder {path.parent}")
    missing = [name for name in ("altair", "vl_convert") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError("--plot: needs altair and vl-convert-python: pip install '.[plot]' where this package lies")


def plot_accuracy(measurements: list[Measurement], path: Path) -> None:
    """Draw predicted against measured times, on logarithmic axes, into an SVG or PNG file.

    Raises
    ------
    ConfigError
        The file's name ends otherwise, it cannot be written, or the drawing packages are not installed.
    """
    check_plottable(path)
    import altair as alt

    times = [m for m in measurements if m.quantity.endswith("_s")]
    frame = pl.DataFrame(
        {
            "measured_s": [m.measured for m in times],
            "predicted_s": [m.predicted for m in times],
            "what": [_LABELS.get(m.quantity, m.quantity) for m in times],
            "role": [m.role for m in times],
        }
    )
    ends = [min(m.measured for m in times) / 1.5, max(m.measured for m in times) * 1.5]
    scale = alt.Scale(type="log", domain=ends, nice=False)
    axis = alt.Axis(format="~s", tickCount=8)
    points = (
        alt.Chart(frame)
        .mark_point(filled=True, size=70, opacity=0.8)
        .encode(
            x=alt.X("measured_s:Q", title="measured, s", scale=scale, axis=axis),
            y=alt.Y("predicted_s:Q", title="predicted, s", scale=scale, axis=axis),
            color=alt.Color("what:N", title=None),
            shape=alt.Shape("role:N", title=None, sort=list(ROLES)),
        )
    )
    # Where the error is at most 15 %, and where there is none.
    bounds = pl.DataFrame({"x": ends, "low": [0.85 * e for e in ends], "high": [1.15 * e for e in ends], "y": ends})
    across = alt.Chart(bounds).encode(x=alt.X("x:Q", scale=scale))
    band = across.mark_area(color="#ddd", clip=True).encode(y=alt.Y("low:Q", scale=scale), y2="high:Q")
    diagonal = across.mark_line(color="#888", strokeWidth=1).encode(y=alt.Y("y:Q", scale=scale))
    chart = alt.layer(band, diagonal, points).properties(
        width=420, height=420, title="Published measurements, predicted and measured (band: 15 %)"
    )
    try:
        chart.save(str(path), scale_factor=2.0)
    except OSError as error:
        raise ConfigError(f"--plot: {path}: cannot be written: {error.strerror or error}") from None


_LABELS = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "attention_s": "decode attention of a layer",
    "ring_compute_s": "attention of a ring step",
    "ring_comm_s": "transfer of a ring step",
    "served_ttft_s": "time to first token of a server",
    "served_tpot_s": "time per output token of a server",
}
