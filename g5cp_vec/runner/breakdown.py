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
from g5cp_vec.engine.arrays import COMPUTE, FLOW
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.graph import REASON, REASONS, OpGraph, split_rate
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import Structure
from g5cp_vec.runner.apart import by_structure
from g5cp_vec.runner.layers import EMBED, HEAD, TRANSFER, Layers, group_layers
from g5cp_vec.runner.passes import Point, split_passes
from g5cp_vec.runner.simulate import simulate_point
from g5cp_vec.runner.tally import UNITS, Category, Sent, Tally, Wait
from g5cp_vec.runner.template import Template

WAITING = "other ranks"
_UNIT_OF_PART = {"gemm": "gemm", "attention": "attention", "memory": "elementwise"}


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A step's time; ``computes`` and ``waits``, largest first, add up to ``step_s``, and so do those of ``layers``."""

    step_s: float
    computes: list[Category]
    waits: list[Wait]
    sent: list[Sent]
    layers: list[Layers]

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
    total, layers, step_s = Tally(), defaultdict[int, Tally](Tally), 0.0
    for numbers, load, structure in by_structure(dep, network, split_passes(dep, point)):
        template = Template(structure, reduced=fidelity == "exact")
        costs = cost_rows(dep, structure.keys, network, load, len(numbers))
        units = _units_of_durations(dep, structure, load, costs.duration_s)
        for i in range(len(numbers)):
            start_s, finish_s = simulate_point(template, costs, i)
            step_s += float(finish_s.max())
            chip = _last_chip(structure.ops, finish_s)
            _add_times(structure.ops, chip, start_s, finish_s, units[i], total, layers)
            _add_sent(structure, chip, costs.bytes[i], total, layers)
    return Breakdown(
        step_s, total.largest_computes(), total.largest_waits(), total.most_sent(), group_layers(layers, step_s)
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


def _last_chip(ops: OpGraph, finish_s: NDArray[np.float64]) -> int:
    """Return the chip whose last compute ends last, the lowest on a tie."""
    ends = np.where(ops.graph.op_kind == COMPUTE, finish_s, -1.0)
    return int(ops.op_src[ends == ends.max()].min())


def _places(ops: OpGraph, chosen: NDArray[np.intp]) -> list[int]:
    """Return for each op its layer, or the place outside layers that its reason tells."""
    reason, layer = ops.op_reason[chosen], ops.op_layer[chosen]
    outside = np.where(reason == REASON["embed"], EMBED, np.where(reason == REASON["pp"], TRANSFER, HEAD))
    places: list[int] = np.where(layer >= 0, layer, outside).tolist()
    return places


def _add_times(
    ops: OpGraph,
    chip: int,
    start_s: NDArray[np.float64],
    finish_s: NDArray[np.float64],
    units: NDArray[np.float64],
    total: Tally,
    layers: dict[int, Tally],
) -> None:
    """Add the computes and waits of a chip in one simulated pass to what is known already."""
    is_compute = ops.graph.op_kind == COMPUTE
    own = np.flatnonzero(is_compute & (ops.op_src == chip))
    own = own[np.argsort(start_s[own], kind="stable")]
    place_of = dict(zip(own.tolist(), _places(ops, own), strict=True))
    for op, place in place_of.items():
        name, seconds = REASONS[ops.op_reason[op]], float(finish_s[op] - start_s[op])
        for tally in (total, layers[place]):
            tally.add_compute(name, seconds, units[ops.graph.op_cost[op]].tolist())
    flows = np.flatnonzero(~is_compute & ((ops.op_src == chip) | (ops.op_dst == chip)))
    flows = flows[np.argsort(start_s[flows], kind="stable")]
    labels = zip(ops.op_reason[flows].tolist(), _places(ops, flows), strict=True)
    intervals = list(zip(start_s[flows].tolist(), finish_s[flows].tolist(), labels, strict=True))
    gaps = zip(np.append(0.0, finish_s[own][:-1]).tolist(), start_s[own].tolist(), own.tolist(), strict=True)
    for op, pieces in _waits(intervals, gaps):
        before = REASONS[ops.op_reason[op]] + (f" step {ops.op_step[op]}" if ops.op_step[op] else "")
        by_name: dict[str, float] = defaultdict(float)
        for label, seconds in pieces.items():
            name, place = (WAITING, place_of[op]) if label == WAITING else (REASONS[label[0]], label[1])
            by_name[name] += seconds
            layers[place].add_wait(name, before, seconds)
        for name, seconds in by_name.items():
            total.add_wait(name, before, seconds)
    touching = np.concatenate([own, flows])
    places = np.asarray(_places(ops, touching))
    for place in np.unique(places).tolist():
        inside = touching[places == place]
        layers[place].span_s += float(finish_s[inside].max() - start_s[inside].min())


def _add_sent(
    structure: Structure, chip: int, n_bytes: NDArray[np.int64], total: Tally, layers: dict[int, Tally]
) -> None:
    """Add the messages that a chip sends in one pass."""
    ops = structure.ops
    flows = np.flatnonzero((ops.graph.op_kind == FLOW) & (ops.op_src == chip))
    names = {number: key if isinstance(key, str) else key[0] for key, number in structure.keys.bytes.items()}
    for op, place in zip(flows.tolist(), _places(ops, flows), strict=True):
        number = int(ops.graph.op_cost[op])
        for tally in (total, layers[place]):
            tally.add_sent(REASONS[ops.op_reason[op]], names[number], int(n_bytes[number]))


def _waits(
    flows: list[tuple[float, float, Any]], gaps: Iterator[tuple[float, float, int]]
) -> Iterator[tuple[int, dict[Any, float]]]:
    """Yield for every gap before an op what the chip waited for in it, and how long (s).

    Flows (start, end, label) and gaps (begin, end, op) come in order. From its end backwards a gap belongs to the
    flow that was in flight and had been for longest: to its label, or to `WAITING`.
    """
    active: list[tuple[float, float, Any]] = []
    at = 0
    for begin, end, op in gaps:
        if end <= begin * (1 + 1e-12):
            continue
        while at < len(flows) and flows[at][0] < end:
            active.append(flows[at])
            at += 1
        active = [flow for flow in active if flow[1] > begin]
        pieces: dict[Any, float] = defaultdict(float)
        left = end
        while left > begin:
            covering = [flow for flow in active if flow[0] < left <= flow[1] * (1 + 1e-12)]
            if covering:
                start, _, label = min(covering)
                until = max(start, begin)
            else:
                label, until = WAITING, max([flow[1] for flow in active if flow[1] < left], default=begin)
                until = max(until, begin)
            pieces[label] += left - until
            left = until
        yield op, pieces
