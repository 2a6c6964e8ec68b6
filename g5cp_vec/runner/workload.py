"""Replay of one workload written out op by op: any DAG, any links (the format of ``g5cp-vec replay``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config._files import describe
from g5cp_vec.config._text import MOST_TABLE_BYTES, read_json_text, read_text
from g5cp_vec.engine.arrays import COMPUTE, FLOW, Costs, Graph
from g5cp_vec.engine.csr import count_predecessors, drop_repeated, group_by, order_chips
from g5cp_vec.engine.measure import no_tags
from g5cp_vec.errors import ConfigError
from g5cp_vec.runner.simulate import run_graph
from g5cp_vec.runner.status import raise_for_status
from g5cp_vec.runner.warm import warm


class Replay(NamedTuple):
    """Times of a replayed workload: the last end, and every op's start and end (s)."""

    makespan: float
    start: NDArray[np.float64]
    finish: NDArray[np.float64]


_OP_KEYS = {"compute": {"kind", "chip", "secs", "prio"}, "flow": {"kind", "route", "bytes", "lat"}}
_MAX_COMPLAINTS = 20
_SHOWN_CHARACTERS = 100
MOST_CHIPS = 2**24
# numpy's scalars are numbers too.
_INTEGER = (int, np.integer)
_NUMBER = (int, float, np.integer, np.floating)


class _Checker:
    """Reads fields of a workload and collects complaints, each with its place."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: list[str] = []

    def fail(self, place: str, text: str) -> None:
        if len(self.lines) < _MAX_COMPLAINTS:
            shown = place if len(place) <= _SHOWN_CHARACTERS else place[: _SHOWN_CHARACTERS - 1] + "…"
            self.lines.append(f"{self.source}: {shown}: {text}")

    def number(
        self, owner: Mapping[str, Any], key: str, place: str, default: float | None = None, *, above_zero: bool = False
    ) -> float:
        value = owner.get(key, default)
        if isinstance(value, bool) or not isinstance(value, _NUMBER):
            self.fail(f"{place}.{key}", f"expected a number, got {describe(value)}" if key in owner else "missing")
            return 0.0
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not 0.0 <= value < math.inf or (above_zero and value == 0.0):
            self.fail(
                f"{place}.{key}", f"expected a finite number {'>' if above_zero else '>='} 0, got {describe(value)}"
            )
            return 0.0
        return value

    def index(self, value: Any, n: int, place: str, what: str) -> int:
        if isinstance(value, bool) or not isinstance(value, _INTEGER) or not 0 <= value < n:
            there_are = f"{what}s are 0 to {n - 1}" if n else f"there are no {what}s"
            self.fail(place, f"unknown {what} {describe(value)}: {there_are}")
            return 0
        return int(value)

    def items(self, owner: Mapping[str, Any], key: str) -> list[Any]:
        if not isinstance(owner.get(key), list | tuple):
            self.fail(
                key, f"expected a list, got {describe(owner[key])}" if key in owner else "missing; expected a list"
            )
            return []
        return list(owner[key])

    def finish(self) -> None:
        if self.lines:
            raise ConfigError(self.lines)


def read_workload(path: str | Path) -> Any:
    """Read a workload file; a file that cannot be read or is not JSON is a `ConfigError`."""
    path = Path(path)
    return read_json_text(path, read_text(path, "a JSON workload", most_bytes=MOST_TABLE_BYTES))


def compile_workload(data: Any, source: str = "<mapping>") -> tuple[Graph, Costs]:
    """Check a workload and turn it into a graph with its costs.

    Parameters
    ----------
    data : mapping
        ``{"links": [...], "chips": n, "ops": [...], "deps": [[pred, succ], ...]}``; an object that carries such a
        mapping under ``"workload"`` is accepted too.
    source : str
        Named in complaints.

    Raises
    ------
    ConfigError
        One line per fault (at most 20), each with its place.
    """
    check = _Checker(source)
    if isinstance(data, Mapping) and isinstance(data.get("workload"), Mapping):
        data = data["workload"]
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: expected an object with links, chips, ops and deps, got {type(data).__name__}")
    for key in data:
        if key not in ("links", "chips", "ops", "deps"):
            check.fail(str(key), "unknown key; expected links, chips, ops, deps")
    lists = {key: check.items(data, key) for key in ("links", "ops", "deps")}
    n_chips: Any = data.get("chips")
    if isinstance(n_chips, bool) or not isinstance(n_chips, _INTEGER) or not 0 <= n_chips <= MOST_CHIPS:
        check.fail("chips", f"expected a whole number of chips from 0 to {MOST_CHIPS}, got {describe(n_chips)}")
    check.finish()  # what refers to a list that is not there would only repeat it
    capacity, link_latency = _read_links(check, lists["links"])
    ops, n_chips = lists["ops"], int(n_chips)
    op_arrays = _read_ops(check, ops, n_chips, len(capacity))
    preds, succs = _read_deps(check, lists["deps"], len(ops))
    check.finish()
    kind, chip, prio, amount, latency, route_indptr, routes = op_arrays
    succ_indptr, succ_indices = drop_repeated(*group_by(len(ops), preds, succs))
    chip_indptr, chip_ops, op_rank = order_chips(n_chips, chip, prio)
    identity = np.arange(len(ops), dtype=np.int32)
    route_op = np.repeat(identity, np.diff(route_indptr))
    latency = latency + np.bincount(route_op, weights=link_latency[routes], minlength=len(ops))
    graph = Graph(
        op_kind=kind,
        op_chip=chip,
        op_cost=identity,
        op_latency=identity,
        op_rank=op_rank,
        chip_indptr=chip_indptr,
        chip_ops=chip_ops,
        route_indptr=route_indptr,
        route_indices=routes,
        route_count=np.ones(len(routes)),
        route_op=route_op,
        succ_indptr=succ_indptr,
        succ_indices=succ_indices,
        pred_count=count_predecessors(len(ops), succ_indices),
        link_capacity=np.arange(len(capacity), dtype=np.int32),
    )
    return graph, Costs(amount, amount, latency, capacity)


def _read_links(check: _Checker, links: list[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    capacity, latency = np.ones(len(links)), np.zeros(len(links))
    for i, link in enumerate(links):
        place = f"links[{i}]"
        if not isinstance(link, Mapping):
            check.fail(place, f"expected an object with bw and lat, got {describe(link)}")
            continue
        for key in link:
            if key not in ("bw", "lat"):
                check.fail(f"{place}.{key}", "unknown key; expected bw, lat")
        capacity[i] = check.number(link, "bw", place, above_zero=True)
        latency[i] = check.number(link, "lat", place, default=0.0)
    return capacity, latency


def _read_ops(check: _Checker, ops: list[Any], n_chips: int, n_links: int) -> tuple[Any, ...]:
    """Return kind, chip, prio, amount (s or bytes), own latency (s), route_indptr, route_indices."""
    n_ops = len(ops)
    kind, chip = np.zeros(n_ops, np.int8), np.full(n_ops, -1, np.int32)
    prio, amount, latency = np.zeros(n_ops, np.int64), np.zeros(n_ops), np.zeros(n_ops)
    routes: list[list[int]] = []
    for i, op in enumerate(ops):
        place, route = f"ops[{i}]", []
        kind_name = op.get("kind") if isinstance(op, Mapping) else None
        keys = _OP_KEYS.get(kind_name) if isinstance(kind_name, str) else None
        if keys is None:
            check.fail(
                f"{place}.kind" if isinstance(op, Mapping) else place,
                f'expected kind "compute" or "flow", got {describe(op if kind_name is None else kind_name)}',
            )
        else:
            for key in op:
                if key not in keys:
                    check.fail(f"{place}.{key}", f"unknown key; a {op['kind']} has {', '.join(sorted(keys))}")
            if op["kind"] == "compute":
                kind[i] = COMPUTE
                chip[i] = check.index(op.get("chip"), n_chips, f"{place}.chip", "chip")
                amount[i] = check.number(op, "secs", place)
                prio[i] = _read_prio(check, op.get("prio", 0), place)
            else:
                kind[i] = FLOW
                amount[i] = check.number(op, "bytes", place)
                route = _read_route(check, op, n_links, place)
                latency[i] = check.number(op, "lat", place, default=0.0)
        routes.append(route)
    route_indptr = np.zeros(n_ops + 1, np.int64)
    np.cumsum([len(route) for route in routes], out=route_indptr[1:])
    indices = np.fromiter(chain.from_iterable(routes), np.int32, count=int(route_indptr[-1]))
    return kind, chip, prio, amount, latency, route_indptr, indices


def _read_prio(check: _Checker, value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, _INTEGER) or not -(2**62) < value < 2**62:
        check.fail(f"{place}.prio", f"expected a whole number, got {describe(value)}")
        return 0
    return int(value)


def _read_route(check: _Checker, op: Mapping[str, Any], n_links: int, place: str) -> list[int]:
    value = op.get("route")
    if not isinstance(value, list | tuple):
        check.fail(
            f"{place}.route", f"expected a list of link ids, got {describe(value)}" if "route" in op else "missing"
        )
        return []
    n_before = len(check.lines)
    route = [check.index(link, n_links, f"{place}.route", "link") for link in value]
    if len(set(route)) != len(route) and len(check.lines) == n_before:
        check.fail(f"{place}.route", f"names a link twice: {describe(value)}")
    return route


def _read_deps(check: _Checker, deps: list[Any], n_ops: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    pairs = np.zeros((len(deps), 2), np.int32)
    for i, dep in enumerate(deps):
        if not isinstance(dep, list | tuple) or len(dep) != 2:
            check.fail(f"deps[{i}]", f"expected [pred, succ], got {describe(dep)}")
            continue
        pairs[i, 0] = check.index(dep[0], n_ops, f"deps[{i}][0]", "op")
        pairs[i, 1] = check.index(dep[1], n_ops, f"deps[{i}][1]", "op")
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def replay_workload(workload: str | Path | Mapping[str, Any]) -> Replay:
    """Simulate a workload given as a path or as the parsed mapping; see `compile_workload`."""
    warm()
    if isinstance(workload, str | Path):
        graph, costs = compile_workload(read_workload(workload), str(workload))
        source = str(workload)
    else:
        graph, costs = compile_workload(workload)
        source = "<mapping>"
    tags = no_tags(len(graph.op_kind), len(graph.chip_indptr) - 1)
    _, _, status, times = run_graph(graph, tags, tuple(column[None] for column in costs), keep_times=True)
    raise_for_status(int(status[0, 0]), status[0, 1:], source)
    start, finish = times.times_s[0]
    return Replay(float(finish.max(initial=0.0)), start, finish)
