"""A network given link by link: the chips and switches it joins, and what is wrong with such a list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from g5cp_vec.config._files import describe
from g5cp_vec.config._machine import Machine, Tables
from g5cp_vec.config._record import Frozen, NonNegative, Positive
from g5cp_vec.config.links import WireNames

# Routes between all pairs are tabulated; beyond this, a kind that computes its routes serves better.
MOST_CHIPS = 4096

_CHIP = re.compile(r"(?:chip)?([0-9]{1,9})")
_SWITCH = re.compile(r"[A-Za-z_][^\s>*]*")


def _node(value: Any) -> int | str:
    """Read the end of a link: a chip (5, "5", "chip5"), or any other name, which is a switch's."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (chip := _CHIP.fullmatch(value)):
        return int(chip[1])
    if isinstance(value, str) and _SWITCH.fullmatch(value):
        return value
    wanted = "the number of a chip, from 0, or the name of a switch, from a letter on and without blanks, > and *"
    raise ValueError(f"expected {wanted}, got {describe(value)}")


Node = Annotated[int | str, BeforeValidator(_node)]


def node_name(node: int | str) -> str:
    """Return the name of a node as links bear it."""
    return f"chip{node}" if isinstance(node, int) else node


class Wire(Frozen):
    """One entry of the list.

    Attributes
    ----------
    src, dst : int or str
        ``from`` and ``to`` in files: a chip's number or a switch's name.
    bandwidth_bytes_per_s : float
        Each way (bytes/s).
    latency_s : float
        Of the link (s).
    both_ways : bool
        Whether the same link leads back.
    """

    src: Node = Field(alias="from")
    dst: Node = Field(alias="to")
    bandwidth_bytes_per_s: Positive
    latency_s: NonNegative
    both_ways: bool = True

    @property
    def directions(self) -> list[tuple[int | str, int | str]]:
        """(from, to) of each link that the entry stands for."""
        return [(self.src, self.dst), (self.dst, self.src)][: 1 + self.both_ways]


@dataclass(frozen=True, eq=False, slots=True)  # equality of arrays is an array
class Wiring:
    """The links of a graph as arrays, sorted by the nodes they leave and enter; their places are their ids.

    Attributes
    ----------
    nodes : list of str
        Names: chips by number, then switches by name.
    ends : ndarray of int64, shape (n_links, 2)
        Nodes that each link leaves and enters.
    capacity, latency : ndarrays of int32, shape (n_links,)
        Ids, numbered in order of first use.
    bytes_per_s, seconds : lists of float
        What the ids stand for.
    """

    nodes: list[str]
    ends: NDArray[np.int64]
    capacity: NDArray[np.int32]
    latency: NDArray[np.int32]
    bytes_per_s: list[float]
    seconds: list[float]


class Graph(Machine):
    """Chips and switches joined by the links listed; routes cross the fewest links.

    A chip may forward. Of several shortest routes all messages of a pair take the one whose first node that differs
    comes first, chips by number before switches by name: equal routes do not share the load. A deployment on fewer
    chips leaves the last ones idle, in place.

    Attributes
    ----------
    n_chips : int
    link : tuple of Wire
    """

    kind: Literal["graph"] = "graph"
    n_chips: Annotated[int, Field(gt=0, le=MOST_CHIPS)]
    link: Annotated[tuple[Wire, ...], Tables] = ()

    def max_chips(self) -> int | None:
        """Return the number of chips."""
        return self.n_chips

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        complaints = list(self._complaints()) or list(self._unreachable())
        if complaints:
            details = [
                InitErrorDetails(type="value_error", loc=place, input=None, ctx={"error": ValueError(message)})
                for place, message in complaints
            ]
            raise ValidationError.from_exception_data(type(self).__name__, details)
        return self

    def _complaints(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield (place, message) for each entry that cannot be."""
        taken: dict[tuple[int | str, int | str], int] = {}
        for place, wire in enumerate(self.link):
            for key, node in (("from", wire.src), ("to", wire.dst)):
                if isinstance(node, int) and node >= self.n_chips:
                    yield ("link", place, key), f"chip {node} does not exist, n_chips = {self.n_chips}"
            if wire.src == wire.dst:
                yield ("link", place), f"joins {node_name(wire.src)} to itself"
                continue
            for src, dst in wire.directions:
                first = taken.setdefault((src, dst), place)
                if first != place:
                    ends = f"{node_name(src)} to {node_name(dst)}"
                    yield ("link", place), f"link[{first}] leads from {ends} already; give one link their bandwidth"

    def _unreachable(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield a pair of chips without a route: every chip must be reached from chip 0, and reach it."""
        ways = [way for wire in self.link for way in wire.directions]
        for backwards in (False, True):
            reached = _reached_from(0, [(dst, src) for src, dst in ways] if backwards else ways)
            lost = next((chip for chip in range(self.n_chips) if chip not in reached), None)
            if lost is not None:
                pair = (lost, 0) if backwards else (0, lost)
                yield ("link",), f"no route from chip {pair[0]} to chip {pair[1]}"
                return

    @cached_property
    def wiring(self) -> Wiring:
        """The links as arrays."""
        ways = {way: wire for wire in self.link for way in wire.directions}
        switches = sorted({node for way in ways for node in way if isinstance(node, str)})
        nodes: list[int | str] = [*range(self.n_chips), *switches]
        place = {node: i for i, node in enumerate(nodes)}
        ordered = sorted((place[src], place[dst], wire) for (src, dst), wire in ways.items())
        capacity, bytes_per_s = _numbered(wire.bandwidth_bytes_per_s for _, _, wire in ordered)
        latency, seconds = _numbered(wire.latency_s for _, _, wire in ordered)
        ends = np.array([way[:2] for way in ordered], np.int64).reshape(-1, 2)
        return Wiring([node_name(node) for node in nodes], ends, capacity, latency, bytes_per_s, seconds)

    def links(self, n_chips: int) -> WireNames:  # noqa: ARG002 (all of them, whatever the deployment uses)
        """Return all links."""
        return WireNames(self.wiring.nodes, self.wiring.ends)


def _reached_from(start: int | str, ways: Iterable[tuple[int | str, int | str]]) -> set[int | str]:
    following: dict[int | str, list[int | str]] = {}
    for src, dst in ways:
        following.setdefault(src, []).append(dst)
    reached, waiting = {start}, [start]
    while waiting:
        for node in following.get(waiting.pop(), ()):
            if node not in reached:
                reached.add(node)
                waiting.append(node)
    return reached


def _numbered(values: Iterable[float]) -> tuple[NDArray[np.int32], list[float]]:
    """Return an id for each value, and the values by id; ids are given in order of first use."""
    ids: dict[float, int] = {}
    numbers = [ids.setdefault(value, len(ids)) for value in values]
    return np.array(numbers, np.int32), list(ids)
