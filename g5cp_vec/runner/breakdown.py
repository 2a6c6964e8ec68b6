"""Where the time of a step goes, on the rank that ends last.

The step is cut into what the rank's chip does: computes, by what they are for; waiting while a transfer into or out of
it is in flight, by what the transfer is for (the exposed communication); waiting for other ranks. These add up to the
step. A compute's time is cut once more into its matrix products, its attention, its element-wise work and what is
fixed. Where several transfers are in flight while the chip waits, the time counts as that of the one that ends last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.roofline import part_seconds
from g5cp_vec.cost.rows import cost_rows, fixed_rows, parts_by_key
from g5cp_vec.engine.arrays import COMPUTE
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.graph import REASONS, OpGraph, split_rate
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import Structure
from g5cp_vec.runner.apart import by_structure
from g5cp_vec.runner.passes import Point, split_passes
from g5cp_vec.runner.simulate import simulate_point
from g5cp_vec.runner.template import Template

UNITS = ("gemm", "attention", "elementwise", "fixed")
WAITING = "other ranks"
_UNIT_OF_PART = {"gemm": "gemm", "attention": "attention", "memory": "elementwise"}


@dataclass(slots=True)
class Category:
    """Computes of one kind on the reported rank.

    Attributes
    ----------
    name : str
        What they are for, one of ``g5cp_vec.mapping.graph.REASONS``.
    n_ops : int
    seconds : float
    gemm_s, attention_s, elementwise_s, fixed_s : float
        What the time went into; they add up to ``seconds``.
    """

    name: str
    n_ops: int = 0
    seconds: float = 0.0
    gemm_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    fixed_s: float = 0.0


@dataclass(slots=True)
class Wait:
    """Waits of one kind on the reported rank.

    Attributes
    ----------
    name : str
        What the transfer is for that is waited for; ``"other ranks"`` where none of the rank's own is in flight.
    before : str
        The compute that follows, with its step where it has one.
    n_waits : int
    seconds, longest_s : float
        All together, and the longest one.
    """

    name: str
    before: str
    n_waits: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A step's time; ``computes`` and ``waits``, largest first, add up to ``step_s``."""

    step_s: float
    computes: list[Category]
    waits: list[Wait]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def break_down(dep: Deployment, point: Point, fidelity: str = "exact") -> Breakdown:
    """Simulate one point and break its time down.

    Parameters
    ----------
    dep : Deployment
    point : Point
        One row.
    fidelity : {"exact", "full"}

    Raises
    ------
    ConfigError
        The point takes the closed form, which has no operations.
    """
    if dep.path == "math":
        raise ConfigError('path: "math" is a closed form without operations to break down; use path = "g5"')
    network = build_network(dep.topology, dep.n_chips)
    computes, waits, step_s = dict[str, Category](), dict[tuple[str, str], Wait](), 0.0
    for numbers, load, structure in by_structure(dep, network, split_passes(dep, point)):
        template = Template(structure, reduced=fidelity == "exact")
        costs = cost_rows(dep, structure.keys, network, load, len(numbers))
        units = _units_of_durations(dep, structure, load, costs.duration_s)
        for i in range(len(numbers)):
            start_s, finish_s = simulate_point(template, costs, i)
            step_s += float(finish_s.max())
            _add_pass(structure.ops, start_s, finish_s, units[i], computes, waits)
    return Breakdown(
        step_s,
        sorted(computes.values(), key=lambda c: -c.seconds),
        sorted(waits.values(), key=lambda w: -w.seconds),
    )


def _units_of_durations(
    dep: Deployment, structure: Structure, load: Any, duration_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the share of every duration that goes into each of `UNITS`, shape (n_passes, n_ids, n_units)."""
    parts = parts_by_key(dep, load)
    rates = np.asarray(structure.network.rates())
    seconds = np.zeros((*duration_s.shape, len(UNITS)))
    fixed_s = fixed_rows(dep, structure.keys, load, len(duration_s))
    for key, column in structure.keys.durations.items():
        (name, kind), rate = split_rate(key)
        for part in parts.get((name.removeprefix("slowed_"), kind), []):
            seconds[:, column, UNITS.index(_UNIT_OF_PART[part.unit])] += part_seconds(dep, part) / rates[rate]
        seconds[:, column, UNITS.index("fixed")] = fixed_s[:, column] / rates[rate]
    # A ring step that a transfer slows down takes longer than its parts.
    slowed = duration_s - seconds.sum(axis=2)
    seconds[:, :, UNITS.index("attention")] += np.where(slowed > 1e-12 * duration_s, slowed, 0.0)
    return seconds


def _add_pass(
    ops: OpGraph,
    start_s: NDArray[np.float64],
    finish_s: NDArray[np.float64],
    units: NDArray[np.float64],
    computes: dict[str, Category],
    waits: dict[tuple[str, str], Wait],
) -> None:
    """Add one simulated pass to what is known already."""
    is_compute = ops.graph.op_kind == COMPUTE
    ends = np.where(is_compute, finish_s, -1.0)
    chip = ops.op_src[ends == ends.max()].min()
    own = np.flatnonzero(is_compute & (ops.op_src == chip))
    own = own[np.argsort(start_s[own], kind="stable")]
    for op in own.tolist():
        category = computes.setdefault(REASONS[ops.op_reason[op]], Category(REASONS[ops.op_reason[op]]))
        category.n_ops += 1
        category.seconds += float(finish_s[op] - start_s[op])
        for unit, seconds in zip(UNITS, units[ops.graph.op_cost[op]].tolist(), strict=True):
            setattr(category, f"{unit}_s", getattr(category, f"{unit}_s") + seconds)
    flows = np.flatnonzero(~is_compute & ((ops.op_src == chip) | (ops.op_dst == chip)))
    flows = flows[np.argsort(start_s[flows], kind="stable")]
    intervals = list(zip(start_s[flows].tolist(), finish_s[flows].tolist(), ops.op_reason[flows].tolist(), strict=True))
    gaps = zip(np.append(0.0, finish_s[own][:-1]).tolist(), start_s[own].tolist(), own.tolist(), strict=True)
    for op, pieces in _waits(intervals, gaps):
        before = REASONS[ops.op_reason[op]] + (f" step {ops.op_step[op]}" if ops.op_step[op] else "")
        for name, seconds in pieces.items():
            wait = waits.setdefault((name, before), Wait(name, before))
            wait.n_waits += 1
            wait.seconds += seconds
            wait.longest_s = max(wait.longest_s, seconds)


def _waits(
    flows: list[tuple[float, float, int]], gaps: Iterator[tuple[float, float, int]]
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield for every gap before an op what the chip waited for in it, and how long (s).

    Flows (start, end, reason) and gaps (begin, end, op) come in order. From its end backwards a gap belongs to the
    flow that was in flight and had been for longest.
    """
    active: list[tuple[float, float, int]] = []
    at = 0
    for begin, end, op in gaps:
        if end <= begin * (1 + 1e-12):
            continue
        while at < len(flows) and flows[at][0] < end:
            active.append(flows[at])
            at += 1
        active = [flow for flow in active if flow[1] > begin]
        pieces: dict[str, float] = defaultdict(float)
        left = end
        while left > begin:
            covering = [flow for flow in active if flow[0] < left <= flow[1] * (1 + 1e-12)]
            if covering:
                start, _, reason = min(covering)
                name, until = REASONS[reason], max(start, begin)
            else:
                name, until = WAITING, max([flow[1] for flow in active if flow[1] < left], default=begin)
                until = max(until, begin)
            pieces[name] += left - until
            left = until
        yield op, pieces
