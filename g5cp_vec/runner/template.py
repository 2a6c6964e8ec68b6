"""A structure made ready to run: chains of decreasing length, and what each rank and link has to do with.

The shortest chain holds one op per symmetry class and few units of every run of repeated layers. A point whose
layers do not settle into a period on it is simulated on the next longer one, at last on one that leaves out nothing.
Traffic and busy times need no simulation: how often a rank sends each kind of message is part of the structure, so
the bytes of every point are one integer matrix product away.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine.arrays import COMPUTE, FLOW, Graph
from g5cp_vec.engine.fold import unfold
from g5cp_vec.engine.measure import ROLE_RING_FIRST, ROLE_RING_FLOW, ROLE_RING_LAST, Tags
from g5cp_vec.mapping.chain import chain_blocks
from g5cp_vec.mapping.graph import REASON, OpGraph
from g5cp_vec.mapping.network import Network
from g5cp_vec.mapping.reduce import Quotient, Run, find_classes, find_runs
from g5cp_vec.mapping.structure import Structure

# Column of the results -> (reasons of the flows, which end of a flow owns them).
TRAFFIC = {
    "passkv_bytes": (("cp_pass_kv", "cp_halo", "cp_gather"), "src"),
    "passq_query_bytes": (("cp_pass_q",), "dst"),
    "passq_reduce_bytes": (("cp_reduce",), "src"),
    "pcp_bytes": (("pcp",), "src"),
    "dcp_bytes": (("dcp",), "src"),
    "tp_bytes": (("tp",), "src"),
    "ep_bytes": (("ep",), "src"),
    "pp_bytes": (("pp",), "src"),
}
SHARDED = ("shard", "attend", "head", "tail", "context", "segment_full", "segment_last")
# Compute ops that attend, by the name in their cost keys (before the rank that some of them name).
RING_STEPS = ("ring_step", "slowed_ring_step")
ATTENDING = (
    *RING_STEPS, "attention", "partial", "ring_partial", "own", "halo", "indexer", "sparse", "states", "scan", *SHARDED,
)  # fmt: skip


class Fold(NamedTuple):
    """How far a chain shortens runs: ``kept`` periods of ``multiple`` units each."""

    multiple: int
    kept: int


# Tried in turn. Two units are enough when nothing is in flight between layers. Ranks that drift apart often settle
# into a state that repeats every second unit, soon or after a few; None leaves nothing out.
FOLDS = (Fold(1, 2), Fold(2, 3), Fold(2, 6), None)


class Chain(NamedTuple):
    """A graph to simulate, with its tags, which name the runs it shortens."""

    ops: OpGraph
    tags: Tags

    @property
    def graph(self) -> Graph:
        """The engine's arrays."""
        return self.ops.graph


class Template:
    """A structure ready to run.

    Parameters
    ----------
    structure : Structure
    reduced : bool
        Whether to simulate symmetry classes and to fold repeated layers.

    Attributes
    ----------
    quotient : Quotient or None
    chips, links : ndarrays of int32
        First member of every chip and link class; every chip and link when not reduced.
    """

    def __init__(self, structure: Structure, *, reduced: bool) -> None:
        self.structure = structure if reduced else structure.whole
        self.quotient: Quotient | None = find_classes(structure) if reduced else None
        symmetry = self.structure.symmetry
        self.chips = self.quotient.chips if self.quotient else symmetry.chips
        self.links = self.quotient.links if self.quotient else symmetry.links
        # The same in the numbering of the structure's blocks.
        self._own_chips = self.quotient.chip_orbits if self.quotient else self.chips
        self._own_links = self.quotient.link_orbits if self.quotient else self.links
        self.runs: list[Run] = find_runs(structure.chain) if reduced else []
        self._chains: dict[Fold | None, Chain] = {}
        # How often each op of the structure's blocks occurs.
        occurrences = Counter(structure.chain)
        n_each = np.diff(self.structure.side_by_side.first_op)
        self._times = np.array([occurrences[i] for i in range(len(n_each))]).repeat(n_each)
        self._sent: dict[str, NDArray[np.int64]] = {}

    @property
    def n_ops(self) -> int:
        """Ops of the whole graph, every rank and every layer."""
        return int(self._times.sum()) * self.structure.symmetry.order

    def folds(self) -> tuple[Fold | None, ...]:
        """Chains to try for a point, shortest first."""
        longest = max((run.repeats for run in self.runs), default=0)
        return tuple(fold for fold in FOLDS if fold is None or fold.multiple * fold.kept < longest)

    def chain(self, fold: Fold | None) -> Chain:
        """Return the chain that shortens every run as ``fold`` says; built once."""
        if fold not in self._chains:
            self._chains[fold] = self._build_chain(fold)
        return self._chains[fold]

    def _build_chain(self, fold: Fold | None) -> Chain:
        s, q = self.structure, self.quotient
        if q is None:
            return Chain(s.ops, _tags(s.ops, np.zeros((0, 4), np.int64)))
        places: list[int] = []
        shortened: list[tuple[int, int, int, int]] = []
        at = 0
        for run in self.runs if fold is not None else []:
            assert fold is not None
            periods, odd_units = divmod(run.repeats, fold.multiple)
            if periods <= fold.kept:
                continue
            # Units that do not fill a period stay in front of the run.
            places += range(at, run.first + odd_units * run.unit)
            unit = fold.multiple * run.unit
            shortened.append((len(places), unit, fold.kept, periods - fold.kept))
            places += range(run.first + odd_units * run.unit, run.first + odd_units * run.unit + fold.kept * unit)
            at = run.first + run.repeats * run.unit
        places += range(at, len(s.chain))
        blocks = [q.blocks[s.chain[place]] for place in places]
        ops = chain_blocks(blocks, [s.layers[place] for place in places], q.link_capacity, len(q.chips))
        first_op = np.concatenate([[0], np.cumsum([len(b.kind) for b in blocks])])
        runs = [(first_op[i], first_op[i + unit] - first_op[i], n, extra) for i, unit, n, extra in shortened]
        return Chain(ops, _tags(ops, np.array(runs, np.int64).reshape(-1, 4)))

    def expand(self, chain: Chain, times_s: NDArray[np.float64], windows_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the times of every op of the whole graph from those of a chain's ops (s)."""
        if self.quotient is None:
            return times_s
        s, q = self.structure, self.quotient
        n_classes = [len(q.blocks[i].kind) for i in s.chain]
        unfolded = unfold(times_s, chain.tags.runs, windows_s, sum(n_classes))
        first = np.concatenate([[0], np.cumsum(n_classes)])
        op_class = [classes[s.orbit_of_ops(i)] for i, classes in enumerate(q.op_class)]
        source = np.concatenate([op_class[i] + first[place] for place, i in enumerate(s.chain)])
        expanded: NDArray[np.float64] = unfolded[source]
        return expanded

    def _per_chip(self, n_ids: int, chosen: NDArray[np.bool_], end: str = "src") -> NDArray[np.int64]:
        """Count over the whole chain, per chip class and cost id, the ``chosen`` ops at this end of theirs."""
        ops = self.structure.side_by_side.ops
        position = np.full(len(self.structure.symmetry.chips), -1, np.int64)
        position[self._own_chips] = np.arange(len(self.chips))
        chip = position.take(getattr(ops, end))
        return _tally(chip, ops.cost, self._times, chosen & (chip >= 0), (len(self.chips), n_ids))

    @cached_property
    def computes(self) -> dict[str, NDArray[np.int64]]:
        """Computes of each chip class per duration id: ``all``, ``attention``, and ``ring`` (steps of a ring)."""
        n_ids = len(self.structure.keys.durations)
        names = [key[0] for key in self.structure.keys.durations]
        everything = self._per_chip(n_ids, self.structure.side_by_side.ops.kind == COMPUTE)
        is_attention = np.array([name.partition("@")[0] in ATTENDING for name in names])
        is_ring = np.array([name in RING_STEPS for name in names])
        return {"all": everything, "attention": everything * is_attention, "ring": everything * is_ring}

    def sent(self, column: str) -> NDArray[np.int64]:
        """Distinct rows of messages of a column of `TRAFFIC` per bytes id, over ranks."""
        if column not in self._sent:
            reasons, end = TRAFFIC[column]
            is_sent = np.zeros(len(REASON), np.bool_)
            is_sent[[REASON[reason] for reason in reasons]] = True
            ops = self.structure.side_by_side.ops
            chosen = (ops.kind == FLOW) & is_sent.take(ops.reason)
            of_chips = self._per_chip(max(len(self.structure.keys.bytes), 1), chosen, end)
            self._sent[column] = np.unique(of_chips, axis=0)
        return self._sent[column]

    @cached_property
    def loads(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Links with distinct loads (the lowest of each, ascending), and their messages per bytes id."""
        n_ids = max(len(self.structure.keys.bytes), 1)
        symmetry = self.structure.symmetry
        position = np.full(len(symmetry.links), -1, np.int64)
        position[self._own_links] = np.arange(len(self.links))
        ops = self.structure.side_by_side.ops
        link = position.take(ops.route_links)
        cost, times = ops.cost.repeat(ops.route_length), self._times.repeat(ops.route_length)
        total = _tally(link, cost, times, link >= 0, (len(self.links), n_ids))
        # So many members of a flow's orbit cross the link.
        total *= symmetry.n_fixing[self._own_links][:, None]
        capacity = self.structure.network.link_capacity[self.links]
        _, first = np.unique(np.column_stack([capacity, total]), axis=0, return_index=True)
        first.sort()
        return self.links[first], total[first]


def _tally(
    row: NDArray[Any],
    column: NDArray[Any],
    times: NDArray[np.int64],
    counted: NDArray[np.bool_],
    shape: tuple[int, int],
) -> NDArray[np.int64]:
    """Count by row and column what is ``counted``, each so many times."""
    places = counted.nonzero()[0]
    total = np.zeros(shape, np.int64)
    np.add.at(total.ravel(), row.take(places) * shape[1] + column.take(places), times.take(places))
    return total


def _tags(ops: OpGraph, runs: NDArray[np.int64]) -> Tags:
    role = np.zeros(len(ops.op_reason), np.int8)
    ring_flow = ops.op_reason == REASON["cp_pass_kv"]
    role[ring_flow] = ROLE_RING_FLOW
    if ring_flow.any():
        attention = ops.op_reason == REASON["attention"]
        last = int(ops.op_step[attention].max())
        role[attention & (ops.op_step == 0)] |= ROLE_RING_FIRST
        role[attention & (ops.op_step == last)] |= ROLE_RING_LAST
    return Tags(role, ops.leave_indptr, ops.leave_ops, ops.arrive_indptr, ops.arrive_ops, bool(ring_flow.any()), runs)


def most_sent(template: Template, column: str, message_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of a traffic column for every point: what the rank that sends most sends.

    Parameters
    ----------
    template : Template
    column : str
        A key of `TRAFFIC`.
    message_bytes : ndarray of int64, shape (n_points, n_ids)
    """
    result: NDArray[np.int64] = (message_bytes @ template.sent(column).T).max(axis=1)
    return result


def busiest_link(
    template: Template, message_bytes: NDArray[np.int64], capacity: NDArray[np.float64], step_s: NDArray[np.float64]
) -> tuple[list[str | None], NDArray[np.float64]]:
    """Name and utilisation (bytes / (capacity * step)) of the most used link of every point; None without traffic."""
    links, messages = template.loads
    if len(links) == 0:
        return [None] * len(step_s), np.full(len(step_s), np.nan)
    network = template.structure.network
    # In floats: a link may carry more bytes than an int64 holds.
    use = (message_bytes.astype(np.float64) @ messages.T.astype(np.float64)) / (
        capacity[:, network.link_capacity[links]] * step_s[:, None]
    )
    return most_used(network, links, use)


def most_used(
    network: Network, links: NDArray[Any], use: NDArray[np.float64]
) -> tuple[list[str | None], NDArray[np.float64]]:
    """Name and use of the most used of some links for every row of ``use``, shape (n_rows, n_links); None at no use."""
    worst, value = use.argmax(axis=1), use.max(axis=1)
    names = {int(place): network.link_name(int(links[place])) for place in np.unique(worst)}
    chosen = [names[place] if v > 0 else None for place, v in zip(worst.tolist(), value, strict=True)]
    return chosen, np.where(value > 0, value, np.nan)
