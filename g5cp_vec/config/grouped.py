"""Machines in the grouped YAML of pod / rack / board / chip tools.

``pods[].count -> racks[].count -> boards[].count -> chips[].{name, count}`` says how many there are; they are numbered
from 0 inside the unit that holds them, group by group, as in ``pod_0/rack_1/board_0/chip_3``. Whatever is named so has
``connections``, of a ``type`` whose ``bandwidth_gbps`` (gigabytes per second, each way) and ``latency_us`` stand under
``interconnect.links``. A connection between two chips is a link each way; one between two boards (racks, pods) is too,
and joins every chip of the one to every chip of the other: they share it. Routes cross the fewest links, and chips
forward; see `g5cp_vec.mapping.network.grouped`. No connection is assumed that is not listed.

``interconnect.comm_params``: ``bandwidth_utilization`` multiplies every bandwidth, as `protocol_efficiency` does
elsewhere; ``sync_latency_us`` is added once to every message; ``switch_latency_us`` and ``cable_latency_us`` once for
every link of type b2b, r2r or p2p that it crosses, for those leave the board.

What the table ``chips`` says of a chip is read when the same file is named as a chip
(`g5cp_vec.config.chip.load_chip`), and never as part of a topology.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field

from g5cp_vec.config._files import describe, read_record
from g5cp_vec.config._machine import Degrade, Machine, SomeTables, Tables
from g5cp_vec.config._record import Count, Fraction, Frozen, NonNegative, Positive, Record, within_reach
from g5cp_vec.config._yaml import is_yaml, read_yaml
from g5cp_vec.config.graph import MOST_CHIPS
from g5cp_vec.config.links import WireNames
from g5cp_vec.errors import ConfigError

__all__ = ["Grouped", "GroupedFile", "Join", "LinkType", "grouped_machine", "is_yaml"]

LinkKind = Literal["c2c", "b2b", "r2r", "p2p"]
_ON_BOARD = "c2c"
_LEVELS = ("pod", "rack", "board", "chip")
_STEP = re.compile(r"(pod|rack|board|chip)_(0|[1-9][0-9]{0,8})")


# --- The file ---------------------------------------------------------------------------------------------------------


class ChipGroup(Frozen):
    """Equal chips of a board."""

    name: Annotated[str, Field(min_length=1)]
    count: Count
    preset_id: Any = None


class _Labelled(Frozen):
    """What describes a unit to people; nothing depends on it."""

    id: Any = None
    name: Any = None
    label: Any = None
    u_height: Any = None
    total_u: Any = None


class BoardGroup(_Labelled):
    """Equal boards of a rack."""

    count: Count
    chips: Annotated[tuple[ChipGroup, ...], SomeTables]


class RackGroup(_Labelled):
    """Equal racks of a pod."""

    count: Count
    boards: Annotated[tuple[BoardGroup, ...], SomeTables]


class PodGroup(_Labelled):
    """Equal pods."""

    count: Count
    racks: Annotated[tuple[RackGroup, ...], SomeTables]


def _in_gigabytes(value: float) -> float:
    within_reach(value * 1e9)
    return value


class Rates(Frozen):
    """Of a type of link; ``gbps`` are gigabytes per second here."""

    bandwidth_gbps: Annotated[Positive, AfterValidator(_in_gigabytes)]
    latency_s: NonNegative


class Links(Frozen):
    """Types of links; those that no connection has may be missing."""

    c2c: Rates | None = None
    b2b: Rates | None = None
    r2r: Rates | None = None
    p2p: Rates | None = None


class CommParams(Frozen):
    """What every message pays; see the top of this file."""

    bandwidth_utilization: Fraction = 1.0
    sync_latency_s: NonNegative = 0.0
    switch_latency_s: NonNegative = 0.0
    cable_latency_s: NonNegative = 0.0


class Interconnect(Frozen):
    """Types of links, and what every message pays."""

    links: Links = Links()
    comm_params: CommParams = CommParams()


class Connection(Frozen):
    """Two units of one kind, by path, and the type of the link between them."""

    source: str
    target: str
    type: LinkKind


class GroupedFile(Record):
    """The file as it is written; ``runtime`` and ``degrade`` are those of any topology."""

    pods: Annotated[tuple[PodGroup, ...], SomeTables]
    chips: dict[str, Any] = {}
    interconnect: Interconnect = Interconnect()
    connections: Annotated[tuple[Connection, ...], Tables] = ()
    runtime: str | None = None
    degrade: Annotated[tuple[Degrade, ...], Tables] = ()


# --- The machine ------------------------------------------------------------------------------------------------------


class Join(Frozen):
    """A link each way between two units.

    Attributes
    ----------
    source, target : (str, int, int)
        Path of the unit, its first chip, and the one after its last.
    type : str
        Of `Grouped.link_type`, by name.
    """

    source: tuple[str, int, int]
    target: tuple[str, int, int]
    type: str


class LinkType(Frozen):
    """Rates of links: bandwidth each way (bytes/s), and what crossing one takes (s)."""

    name: str
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)]
    latency_s: Annotated[float, Field(ge=0)]


class Grouped(Machine):
    """Chips on boards in racks in pods, with the connections that a file lists.

    Attributes
    ----------
    n_chips : int
    link_type : tuple of LinkType
    join : tuple of Join
        As listed.
    message_latency_s : float
        What every message between two chips pays before its links' latencies (s).
    """

    kind: Literal["grouped"] = "grouped"
    n_chips: Annotated[int, Field(gt=0, le=MOST_CHIPS)]
    link_type: tuple[LinkType, ...]
    join: tuple[Join, ...]
    message_latency_s: NonNegative

    def max_chips(self) -> int | None:
        """Return the number of chips."""
        return self.n_chips

    @cached_property
    def directed(self) -> list[tuple[tuple[str, int, int], tuple[str, int, int], int]]:
        """(from, to, place of the type) of every link, by id.

        Sorted by the chips that the ends hold, so that the order in a file does not matter; of units with the same
        chips the smaller comes first.
        """
        place = {kind.name: i for i, kind in enumerate(self.link_type)}
        ways = [(a, b, place[j.type]) for j in self.join for a, b in ((j.source, j.target), (j.target, j.source))]
        return sorted(ways, key=lambda way: [(first, end, path.count("/")) for path, first, end in way[:2]])

    def links(self, n_chips: int) -> WireNames:  # noqa: ARG002 (all of them, whatever the deployment uses)
        """Return all links, named by the paths that they join."""
        directed = self.directed
        paths = list(dict.fromkeys(end[0] for way in directed for end in way[:2]))
        place = {path: i for i, path in enumerate(paths)}
        ends = [(place[src[0]], place[dst[0]]) for src, dst, _ in directed]
        return WireNames(paths, np.array(ends, np.int64).reshape(-1, 2))


def grouped_machine(path: Path) -> Grouped:
    """Return the machine that a grouped YAML file describes.

    Raises
    ------
    ConfigError
        With one line for every complaint.
    """
    table = read_yaml(path)
    # What is known of a chip has another format, and is nothing to a network.
    chips = table.get("chips", {})
    file = read_record(GroupedFile, path, {**table, "chips": {} if isinstance(chips, dict) else chips})
    _check_counts(path, file)
    spans = dict(_spans(file))
    n_chips = max(end for _, end in spans.values())
    lines, join = [], []
    for place, connection in enumerate(file.connections):
        where = f"{path}: connections[{place}]"
        problems = [f"{where}.{problem}" for problem in _problems(file, spans, connection)]
        lines += problems
        if not problems:
            ends = [(end, *spans[end]) for end in (connection.source, connection.target)]
            join.append(Join(source=ends[0], target=ends[1], type=connection.type))
    lines = lines or [f"{path}: connections{line}" for line in (*_repeated(join), *_cut_off(join, spans, n_chips))]
    if lines:
        raise ConfigError(lines)
    params = file.interconnect.comm_params
    return Grouped(
        name=file.name,
        n_chips=n_chips,
        link_type=_link_types(file),
        join=tuple(join),
        message_latency_s=params.sync_latency_s,
        protocol_efficiency=params.bandwidth_utilization,
        runtime=file.runtime,
        degrade=file.degrade,
    )


def _link_types(file: GroupedFile) -> tuple[LinkType, ...]:
    params, used = file.interconnect.comm_params, {connection.type for connection in file.connections}
    types = []
    for name in sorted(used):
        rates = getattr(file.interconnect.links, name)
        beyond = 0.0 if name == _ON_BOARD else params.switch_latency_s + params.cable_latency_s
        types.append(
            LinkType(name=name, bandwidth_bytes_per_s=rates.bandwidth_gbps * 1e9, latency_s=rates.latency_s + beyond)
        )
    return tuple(types)


def _check_counts(path: Path, file: GroupedFile) -> None:
    """Refuse machines too large to be numbered chip by chip, before that is tried, and those of several kinds."""
    n_chips, kinds = 0, dict[str, None]()
    for pod in file.pods:
        for rack in pod.racks:
            for board in rack.boards:
                n_chips += pod.count * rack.count * board.count * sum(group.count for group in board.chips)
                kinds |= dict.fromkeys(group.name for group in board.chips)
    if n_chips > MOST_CHIPS:
        # A count of thousands of digits is no number to show.
        shown = str(n_chips) if n_chips < 10**18 else "more than 10^18"
        raise ConfigError(f"{path}: pods: {shown} chips, expected at most {MOST_CHIPS}")
    if len(kinds) > 1:
        raise ConfigError(f"{path}: pods: chips {', '.join(map(repr, kinds))}, expected one kind in all of a machine")


def _spans(file: GroupedFile) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the path of every unit with its first chip and the one after its last."""
    chip = 0
    pods = [pod for pod in file.pods for _ in range(pod.count)]
    for p, pod in enumerate(pods):
        pod_first = chip
        racks = [rack for rack in pod.racks for _ in range(rack.count)]
        for r, rack in enumerate(racks):
            rack_first = chip
            boards = [board for board in rack.boards for _ in range(board.count)]
            for b, board in enumerate(boards):
                board_first, path = chip, f"pod_{p}/rack_{r}/board_{b}"
                for c in range(sum(group.count for group in board.chips)):
                    yield f"{path}/chip_{c}", (chip, chip + 1)
                    chip += 1
                yield path, (board_first, chip)
            yield f"pod_{p}/rack_{r}", (rack_first, chip)
        yield f"pod_{p}", (pod_first, chip)


def _problems(file: GroupedFile, spans: dict[str, tuple[int, int]], connection: Connection) -> Iterator[str]:
    for key in ("source", "target"):
        if (problem := _path_problem(spans, getattr(connection, key))) is not None:
            yield f"{key}: {problem}"
            return
    source, target = connection.source, connection.target
    if source == target:
        yield f"target: {describe(target)} is the source itself"
    elif source.count("/") != target.count("/"):
        yield f"target: {describe(target)} is a {_level(target)} and the source a {_level(source)}; join equals"
    elif getattr(file.interconnect.links, connection.type) is None:
        yield f"type: interconnect.links.{connection.type} is missing, which has its bandwidth and latency"


def _level(path: str) -> str:
    return _LEVELS[path.count("/")]


def _path_problem(spans: dict[str, tuple[int, int]], path: str) -> str | None:
    """Return why a path leads nowhere; None where it names a unit."""
    if path in spans:
        return None
    steps = path.split("/")
    found = [_STEP.fullmatch(step) for step in steps]
    kinds = tuple(step[1] for step in found if step is not None)
    if None in found or kinds != _LEVELS[: len(steps)]:
        return f"expected a path like pod_0/rack_0/board_0/chip_0 or the beginning of one, got {describe(path)}"
    within = "/".join(steps[: next(i for i in range(len(steps)) if "/".join(steps[: i + 1]) not in spans)])
    return f"no {describe(path)}, {within or 'the machine'} has no {steps[within.count('/') + bool(within)]}"


def _repeated(join: list[Join]) -> Iterator[str]:
    taken: dict[frozenset[str], int] = {}
    for place, one in enumerate(join):
        first = taken.setdefault(frozenset((one.source[0], one.target[0])), place)
        if first != place:
            yield f"[{place}]: joins {one.source[0]} and {one.target[0]} as connections[{first}] does; keep one"


def _cut_off(join: list[Join], spans: dict[str, tuple[int, int]], n_chips: int) -> Iterator[str]:
    """Yield a pair of chips without a route.

    Links lead both ways, and there and back again from each chip of a unit to every other: what a join touches hangs
    together.
    """
    if n_chips > 1 and not join:
        yield ": missing; list what joins what, or describe the machine in TOML with kind = 'tiered'"
        return
    parent = list(range(n_chips))

    def root(chip: int) -> int:
        while parent[chip] != chip:
            parent[chip] = chip = parent[parent[chip]]
        return chip

    for _, first, end in {end for one in join for end in (one.source, one.target)}:
        for chip in range(first + 1, end):
            parent[root(chip)] = root(first)
    for one in join:
        parent[root(one.target[1])] = root(one.source[1])
    lost = next((chip for chip in range(n_chips) if root(chip) != root(0)), None)
    if lost is not None:
        paths = {first: path for path, (first, _) in spans.items() if path.count("/") == len(_LEVELS) - 1}
        yield f": no route from {paths[0]} to {paths[lost]}"
