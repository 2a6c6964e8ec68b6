"""Surfaces from measured rows.

For each kind of kernel all rows are fitted together, those of other chips too (peers), in two stages. A closed form
(overhead, arithmetic and memory efficiency; see :mod:`g5cp_vec.cost.calibration`) takes what is common, its three
numbers varying a little with chip, library and labels (ridge regression). A Gaussian process takes the rest. Both
together give the duration at every node of the grid of sizes that the chip was measured at, refined such that
neighbours are at most a factor of two apart: a surface. Residuals are those of tenfold cross-validation, the process'
parameters (a dozen numbers) learnt once from all rows.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.calibration.gaussian import Inputs, condition, learn
from g5cp_vec.calibration.tables import Row, places
from g5cp_vec.config.calibration import AXES, Calibration, Surface
from g5cp_vec.config.chip import Chip, Efficiency
from g5cp_vec.cost.calibration import WORK, closed_form
from g5cp_vec.errors import ConfigError

Real = NDArray[np.float64]

N_FOLDS = 10
# Fewer rows than this are not split for residuals; up to as many as there are folds are left out one by one.
LEAST_FOR_RESIDUALS = 5
FINEST_RATIO = 2.0
# Nodes times rows whose covariance is computed at once: a few gigabytes.
MOST_PREDICTED = 5 * 10**7
# Rows this long are judged by their efficiency, shorter ones mostly by launching.
LONG_S = 20e-6
# Prior of the closed form: 8 us, and 0.67 and 0.74 of the peaks; how strongly it, and what varies, are held to it.
_PRIOR = np.array([np.log(8e-6), 0.4, 0.3])
_HOLD_COMMON, _HOLD_VARYING = 0.02, 3.0
# Products with up to this many rows, and at least so many bytes, show what memory bandwidth can be reached.
FEW_ROWS, MANY_BYTES = 16, 50_000_000
# Axes along which a longer shape never takes less time.
_LENGTHS = ("length", "context")


class Machine(NamedTuple):
    """What the closed form needs of a chip: peak by element type (flop/s), memory bandwidth (bytes/s)."""

    peak: Callable[[str], float]
    bandwidth: float
    rate_class: int

    @staticmethod
    def at(peak: Callable[[str], float], bandwidth: float) -> Machine:
        """Return a machine in its rate class: those with about the same bf16 peak, within a factor of 1.4."""
        return Machine(peak, bandwidth, round(np.log2(peak("bf16"))))

    @staticmethod
    def of(chip: Chip) -> Machine:
        """Return the machine behind a chip."""
        return Machine.at(chip.peak, chip.hbm_bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Judged:
    """Rows and what was predicted for them without them."""

    rows: list[Row]
    predicted_s: Real

    @property
    def error(self) -> Real:
        """Relative error."""
        measured = np.array([row.seconds for row in self.rows])
        result: Real = np.abs(self.predicted_s / measured - 1)
        return result


@dataclass
class Fitted:
    """Result of a fit.

    Attributes
    ----------
    surfaces : list of Surface
        Of the chip, none of them the default of anything yet.
    uses : dict
        Element type that a surface may serve in a simulation, by variant.
    judged : list of Judged
        Cross-validation of the chip's rows, kind by kind.
    memory_efficiency : float or None
    """

    surfaces: list[Surface] = field(default_factory=list)
    uses: dict[Any, str] = field(default_factory=dict)
    judged: list[Judged] = field(default_factory=list)
    memory_efficiency: float | None = None


class _Problem(NamedTuple):
    """Rows of one kind as arrays."""

    rows: list[Row]
    machines: list[Machine]
    flop_s: Real
    byte_s: Real
    sizes: Real
    factors: NDArray[np.int64]
    log_s: Real


def memory_efficiency(rows: Sequence[Row], bandwidth: float) -> float | None:
    """Return the median share of the bandwidth that products of few rows and large matrices reach; None without any."""
    shares = []
    for row in rows:
        if row.kind == "gemm" and row.place[0] <= FEW_ROWS:
            _, n = WORK["gemm"](dict(row.constants), *row.place)
            if n >= MANY_BYTES:
                shares.append(n / bandwidth / row.seconds)
    return min(float(np.median(shares)), 1.0) if shares else None


def fit_rows(rows: Sequence[Row], machines: Mapping[str, Machine], system: str) -> Fitted:
    """Fit the surfaces of one chip.

    Parameters
    ----------
    rows : sequence of Row
        Of this chip and of peers.
    machines : mapping
        The machine of every system in the rows.
    system : str
        The chip's, as the rows spell it.
    """
    fitted = Fitted()
    by_system = {name: [row for row in rows if row.system == name] for name in machines}
    shares = {name: memory_efficiency(by_system[name], machine.bandwidth) for name, machine in machines.items()}
    fitted.memory_efficiency = shares[system]
    for kind in dict.fromkeys(row.kind for row in rows if row.system == system):
        chosen = [row for row in rows if row.kind == kind]
        _fit_kind(chosen, machines, system, shares, fitted)
    return fitted


def _problem(rows: list[Row], machines: Mapping[str, Machine], shares: Mapping[str, float | None]) -> _Problem:
    own = [machines[row.system] for row in rows]
    flop_s, byte_s = _peaks(rows, own, places(rows))
    default = Efficiency().memory
    extra = np.array(
        [row.extra_bytes / m.bandwidth / (shares[row.system] or default) for row, m in zip(rows, own, strict=True)]
    )
    log_s = np.log(np.maximum(np.array([row.seconds for row in rows]) - extra, 1e-9))
    return _Problem(rows, own, flop_s, byte_s, _sizes(places(rows)), _factors(rows, own), log_s)


def _peaks(rows: Sequence[Row], machines: Sequence[Machine], place: Real) -> tuple[Real, Real]:
    """Return the times of arithmetic and of traffic at peak, rows at places (s)."""
    flop_s, byte_s = np.empty(len(place)), np.empty(len(place))
    for i, (row, machine) in enumerate(zip(rows, machines, strict=True)):
        constants = dict(row.constants)
        flops, n = WORK[row.kind](constants, *place[i])
        link = constants.get("link_gigabytes_per_second")
        flop_s[i] = flops / machine.peak(row.arithmetic_dtype)
        byte_s[i] = n / (machine.bandwidth if link is None else link * 1e9)
    return flop_s, byte_s


def _sizes(place: Real) -> Real:
    """Logarithms of the sizes, and their sum: how much work there is often decides more than its shape."""
    logs = np.log2(place)
    return np.column_stack([logs, logs.sum(axis=1)])


def _factors(rows: Sequence[Row], machines: Sequence[Machine]) -> NDArray[np.int64]:
    """Codes of what distinguishes rows, one column a factor; one that never varies, or repeats another, is left out."""
    columns: list[list[Any]] = [
        [machine.rate_class for machine in machines],
        [row.system for row in rows],
        [row.backend for row in rows],
        [row.library for row in rows],
        [row.constants for row in rows],
    ]
    names = dict.fromkeys(name for row in rows for name, _ in row.labels)
    columns += [[dict(row.labels).get(name, "") for row in rows] for name in names]
    codes: list[list[int]] = []
    for column in columns:
        levels = {value: i for i, value in enumerate(dict.fromkeys(column))}
        coded = [levels[value] for value in column]
        if len(levels) > 1 and coded not in codes:
            codes.append(coded)
    return np.array(codes, np.int64).reshape(len(codes), len(rows)).T


def _common_form(problem: _Problem, rows: NDArray[np.int64]) -> Real:
    """Fit the closed form to some rows; return its three numbers (logarithms) at every row, shape (3, n)."""
    from scipy.optimize import least_squares

    groups = np.column_stack([np.zeros(len(problem.rows), np.int64), problem.factors])
    offsets = np.concatenate([[0], np.cumsum(groups.max(axis=0) + 1)])
    columns = groups + offsets[:-1]
    n = int(offsets[-1])
    start, hold = np.zeros(3 * n), np.full(3 * n, _HOLD_VARYING)
    start[::n], hold[::n] = _PRIOR, _HOLD_COMMON

    def numbers(x: Real, which: NDArray[np.int64]) -> Real:
        result: Real = x.reshape(3, n)[:, columns[which]].sum(axis=2)
        return result

    def misfit(x: Real) -> Real:
        values = _form(numbers(x, rows), problem.flop_s[rows], problem.byte_s[rows])
        return np.concatenate([values - problem.log_s[rows], hold * (x - start)])

    found = least_squares(misfit, start, loss="soft_l1", f_scale=0.2, max_nfev=60).x
    return numbers(found, np.arange(len(problem.rows)))


def _form(numbers: Real, flop_s: Real, byte_s: Real) -> Real:
    result: Real = np.log(closed_form(flop_s, byte_s, np.exp(numbers[0]), np.exp(-numbers[1]), np.exp(-numbers[2])))
    return result


def _fit_kind(
    rows: list[Row], machines: Mapping[str, Machine], system: str, shares: Mapping[str, float | None], fitted: Fitted
) -> None:
    """Add the chip's surfaces of one kind, and their residuals."""
    own = np.flatnonzero([row.system == system for row in rows])
    kind = rows[0].kind
    nodes = [refined(sorted({rows[i].place[axis] for i in own})) for axis in range(len(AXES[kind]))]
    n_nodes = math.prod(map(len, nodes))
    if n_nodes * len(rows) > MOST_PREDICTED:
        sizes = " x ".join(f"{len(axis)} {name}" for name, axis in zip(AXES[kind], nodes, strict=True))
        raise ConfigError(
            f"{kind}: the sizes of {len(own)} rows span a grid of {sizes} = {n_nodes:,} nodes, expected at most "
            f"{MOST_PREDICTED // len(rows):,}; keep rows that share their sizes"
        )
    measured = np.arange(len(rows))
    rows = rows + _absent(rows, machines, system)
    problem = _problem(rows, machines, shares)
    inputs = Inputs(problem.sizes, problem.factors)
    numbers = _common_form(problem, measured)
    left = (problem.log_s - _form(numbers, problem.flop_s, problem.byte_s))[measured]
    parameters = learn(inputs.take(measured), left)
    judged = _cross_validate(problem, parameters, measured, own)
    if judged is not None:
        fitted.judged.append(judged)
    process = condition(parameters, inputs.take(measured), left)
    place = np.array(list(itertools.product(*nodes)), float)
    first = {rows[i].variant: i for i in reversed([*own, *range(len(measured), len(rows))])}
    for variant, i in sorted(first.items(), key=lambda item: item[1]):
        row = rows[i]
        at = Inputs(_sizes(place), np.repeat(problem.factors[[i]], len(place), axis=0))
        flop_s, byte_s = _peaks([row] * len(place), [machines[system]] * len(place), place)
        seconds = np.exp(_form(numbers[:, [i]], flop_s, byte_s) + process.predict(at))
        seconds = _rising(seconds.reshape([len(axis) for axis in nodes]), AXES[kind])
        mine = [j for j in own if rows[j].variant == variant]
        error = _errors_of(judged, variant) if mine else None
        fitted.surfaces.append(
            Surface(
                kind=kind,
                library=row.library,
                labels=row.labels,
                arithmetic_dtype=row.arithmetic_dtype,
                constants=row.constants,
                axes=tuple((name, tuple(map(float, axis))) for name, axis in zip(AXES[kind], nodes, strict=True)),
                duration_s=tuple(_short(x) for x in seconds.ravel()),
                overhead_s=_short(float(np.exp(numbers[0, i]))),
                arithmetic_efficiency=_short(float(np.exp(-numbers[1, i]))),
                memory_efficiency=_short(float(np.exp(-numbers[2, i]))),
                n_rows=len(mine),
                median_error=None if error is None else _short(float(np.median(error))),
                p90_error=None if error is None else _short(float(np.quantile(error, 0.9))),
            )
        )
        fitted.uses[variant] = row.use


def _absent(rows: list[Row], machines: Mapping[str, Machine], system: str) -> list[Row]:
    """Return one row, as if of the chip, for each variant that only chips of its rate class were measured with.

    Their kernels run on this chip too; what they take follows from how chip and library differ elsewhere. Nothing is
    fitted to these rows, and no simulation takes their surfaces.
    """
    own = {row.variant for row in rows if row.system == system}
    rate_class = machines[system].rate_class
    peers = [row for row in rows if row.variant not in own and machines[row.system].rate_class == rate_class]
    return [row._replace(system=system, use="") for row in {row.variant: row for row in reversed(peers)}.values()]


def _short(value: float) -> float:
    """Four digits are far more than a fit knows."""
    return float(f"{value:.4g}")


def refined(values: Sequence[float]) -> list[float]:
    """Return rising values with others put between (evenly in the logarithm) where two are more than twice apart."""
    nodes = [values[0]]
    for low, high in itertools.pairwise(values):
        n = max(1, int(np.ceil(np.log(high / low) / np.log(FINEST_RATIO) - 1e-9)))
        nodes += [float(f"{low * (high / low) ** (i / n):.6g}") for i in range(1, n)]
        nodes.append(high)
    return nodes


def _rising(seconds: Real, axes: Sequence[str]) -> Real:
    """Raise durations that would fall with a growing length."""
    for axis, name in enumerate(axes):
        if name in _LENGTHS:
            seconds = np.maximum.accumulate(seconds, axis=axis)
    return seconds


def _cross_validate(
    problem: _Problem, parameters: Real, measured: NDArray[np.int64], own: NDArray[np.int64]
) -> Judged | None:
    """Predict each of the chip's rows from the others and the peers', at most ten parts in turn."""
    n = len(measured)
    if len(own) < LEAST_FOR_RESIDUALS:
        return None
    predicted = np.empty(n)
    order = np.random.default_rng(0).permutation(n)
    inputs = Inputs(problem.sizes, problem.factors)
    for fold in range(min(N_FOLDS, n)):
        out = order[fold::N_FOLDS]
        kept = np.setdiff1d(np.arange(n), out)
        common = _form(_common_form(problem, kept), problem.flop_s, problem.byte_s)
        process = condition(parameters, inputs.take(kept), (problem.log_s - common)[kept])
        predicted[out] = common[out] + process.predict(inputs.take(out))
    rows = [problem.rows[i] for i in own]
    extra = np.array([row.seconds for row in rows]) - np.exp(problem.log_s[own])
    return Judged(rows, np.exp(predicted[own]) + extra)


def _errors_of(judged: Judged | None, variant: Any) -> Real | None:
    if judged is None:
        return None
    return judged.error[[row.variant == variant for row in judged.rows]]


def choose_defaults(surfaces: Sequence[Surface], uses: Mapping[Any, str]) -> list[Surface]:
    """Return the surfaces with one default for each kind and element type that a simulation asks for.

    The fastest (geometric mean over the nodes) among those with at least half as many rows as the best-covered one.
    """
    groups: dict[tuple[str, str], list[Surface]] = {}
    for surface in surfaces:
        if uses.get(surface.variant):
            groups.setdefault((surface.kind, uses[surface.variant]), []).append(surface)
    best = {}
    for (_, dtype), group in groups.items():
        most = max(surface.n_rows for surface in group)
        covered = [surface for surface in group if 2 * surface.n_rows >= most]
        fastest = min(covered, key=lambda surface: float(surface.log_duration.mean()))
        best[fastest.variant] = dtype
    return [s.model_copy(update={"default_for": best.get(s.variant, "")}) for s in surfaces]


def calibration_of(fitted: Fitted, previous: Calibration | None, source: str, tables: Sequence[str]) -> Calibration:
    """Return the calibration that a fit makes of a chip: what it fitted anew, and what the chip had besides."""
    surfaces, uses = list(fitted.surfaces), dict(fitted.uses)
    names, share = list(tables), fitted.memory_efficiency
    if previous is not None:
        anew = {surface.variant for surface in surfaces}
        kept = [surface for surface in previous.surface if surface.variant not in anew]
        taken = {(s.kind, uses[s.variant]) for s in surfaces if uses[s.variant]}
        # What the user measures of a kernel is what they run: it takes the place of the default.
        uses |= {s.variant: s.default_for for s in kept if (s.kind, s.default_for) not in taken}
        surfaces += kept
        names += [name for name in previous.tables if name not in names]
        share = share if share is not None else previous.memory_efficiency
        if kept:
            source = f"{source}; {previous.source}"
    return Calibration(
        source=source,
        fitted=datetime.date.today().isoformat(),
        tables=tuple(names),
        memory_efficiency=None if share is None else _short(share),
        surface=tuple(choose_defaults(surfaces, uses)),
    )
