"""Operation graphs as arrays, built from blocks.

A deployment repeats a few distinct layers, so a graph is a chain of *blocks* (embedding, a layer, a transfer
between stages, the head). A block is built once, for all ranks of its stage at a time, with ops numbered from 0;
the chain copies it as often as it occurs and joins consecutive blocks chip by chip: every op that a block
declares as an *entry* of a chip waits for every op that the block before declares as an *exit* of that chip.

Op order, which users of the arrays may rely on: block by block, within a block as created, within one creation
in the order of the chips given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine.arrays import COMPUTE, FLOW, NONE, Graph
from g5cp_vec.mapping.keys import (
    REASON,
    REASONS,
    ComputeKey,
    CostKeys,
    DurationKey,
    MessageKey,
    latency_block,
    split_rate,
)  # fmt: skip
from g5cp_vec.mapping.network import Network
from g5cp_vec.mapping.sends import (
    Exchange,
    Sends,
    each_step,
    flat,
    homes_of,
    receivers_and_slots,
    senders_and_slots,
)
from g5cp_vec.mapping.symmetry import Symmetry, no_symmetry

__all__ = [
    "REASON", "REASONS", "Block", "BlockBuilder", "ComputeKey", "CostKeys", "DurationKey", "Handles",
    "Ids", "MessageKey", "OpGraph", "split_rate",
]  # fmt: skip

Ids = NDArray[np.int32]
# Ops of a block as `BlockBuilder` hands them out.
Handles = NDArray[Any]


class OpGraph(NamedTuple):
    """An operation graph with the tags that say what each op is.

    Attributes
    ----------
    graph : Graph
        The engine's arrays.
    op_src, op_dst : ndarrays of int32, shape (n_ops,)
        Chips that a flow leaves and enters; both the chip itself for a compute op.
    op_reason : ndarray of int8, shape (n_ops,)
        Position in `REASONS`.
    op_layer : ndarray of int32, shape (n_ops,)
        Layer of the model, -1 outside layers.
    op_step : ndarray of int32, shape (n_ops,)
        Ring step or step of a collective, 0 elsewhere.
    leave_indptr, leave_ops : ndarrays of int64 (n_chips + 1,) and int32
        Flows out of each chip.
    arrive_indptr, arrive_ops : ndarrays of int64 (n_chips + 1,) and int32
        Flows into each chip.
    n_chips : int
    """

    graph: Graph
    op_src: NDArray[np.int32]
    op_dst: NDArray[np.int32]
    op_reason: NDArray[np.int8]
    op_layer: NDArray[np.int32]
    op_step: NDArray[np.int32]
    leave_indptr: NDArray[np.int64]
    leave_ops: Ids
    arrive_indptr: NDArray[np.int64]
    arrive_ops: Ids
    n_chips: int


class Block(NamedTuple):
    """A part of a graph with ops numbered from 0; the fields are those of `OpGraph` and `Graph`.

    Pairs (``leave_chip``, ``leave_op``) name the flows out of each chip, ``arrive_*`` those into it; ``route_length``
    has one entry per op, ``route_links`` and ``route_count`` one per link crossed; ``handle`` is `BlockBuilder`'s.
    """

    kind: NDArray[np.int8]
    src: Ids
    dst: Ids
    cost: Ids
    latency: Ids
    prio: Ids
    reason: NDArray[np.int8]
    step: Ids
    route_length: NDArray[np.int64]
    route_links: Ids
    route_count: NDArray[np.float64]
    pred: Ids
    succ: Ids
    entry_chip: Ids
    entry_op: Ids
    exit_chip: Ids
    exit_op: Ids
    leave_chip: Ids
    leave_op: Ids
    arrive_chip: Ids
    arrive_op: Ids
    n_prio: int
    handle: Handles = np.zeros(0, np.int64)


_NO_LINKS = np.zeros(0, np.int32)
_ROUTE_TYPES = (np.int64, np.int32, np.int32)


class BlockBuilder:
    """Collects the ops of a block.

    An op has a *handle*: slot * n_chips + home. A creation opens a slot, several for repeated sends, in which an op's
    home is its own: the chip that computes or sends, or the one that receives where chips send more than once. Handles
    have the shape of the chips given. Negative ones stand for all that an exchange delivers to a chip.

    Under a symmetry only the ops at home on the lowest chip of each orbit are kept, and the block built is one of
    orbits: its chips and links are positions in ``symmetry.chips`` and ``symmetry.links``.
    ``library_calls``: whether messages and the calls of `LIBRARY_CALLS` have latencies of their own.
    """

    def __init__(
        self,
        network: Network,
        symmetry: Symmetry | None = None,
        known: dict[bytes, Sends] | None = None,
        *,
        library_calls: bool = False,
    ) -> None:
        self.network = network
        self.library_calls = library_calls
        self.symmetry = symmetry or no_symmetry(network)
        self.n_slots = 0
        self.n_prio = 0
        self._n = network.n_chips
        self._whole = self.symmetry.order == 1
        self._is_kept = np.zeros(self._n, np.bool_)
        self._is_kept[self.symmetry.chips] = True
        self._tags: list[tuple[int, int, int, int, int]] = []
        self._ops: list[tuple[Ids, Ids, Ids]] = []
        self._handles: list[NDArray[np.int64]] = []
        self._routes: list[tuple[NDArray[np.int64], Ids, Ids]] = []
        # Steps of a ring send along the same pairs of chips, given as the same arrays; blocks along equal ones.
        self._given: dict[tuple[int, int], Sends] = {}
        self._known: dict[bytes, Sends] = {} if known is None else known
        self._computing: dict[int, tuple[Ids, Ids, Ids, Handles]] = {}
        self._exchanges: list[Exchange] = []
        self._edges: tuple[list[Handles], list[Handles]] = ([], [])
        self._entry: tuple[list[Ids], list[Handles]] = ([], [])
        self._exit: tuple[list[Ids], list[Handles]] = ([], [])

    def compute(self, chips: Ids, cost: int, reason: str, step: int = 0, n_steps: int = 1) -> Handles:
        """Add compute ops, next in every chip's program order; ``cost`` is that at full speed.

        Each of ``n_steps`` on a chip waits for the one before; the first of them are returned.
        """
        known = self._computing.get(id(chips))
        if known is None:
            (kept,) = self._keep(chips, chips)
            known = self._computing[id(chips)] = (chips, kept, self.network.chip_rate[kept], chips.astype(np.int64))
        _, kept, rate, home = known
        first, n, steps = self.n_slots, len(kept), np.arange(n_steps)[:, None]
        ops = (each_step(kept, n_steps), each_step(kept, n_steps), each_step(rate + np.int32(cost), n_steps))
        routes = (np.zeros(n * n_steps, np.int64), _NO_LINKS, np.full(n * n_steps, NONE, np.int32))
        handles = (steps * self._n + kept).ravel()
        self._add(COMPUTE, ops, routes, reason, range(step, step + n_steps), handles, n_steps)
        if n_steps > 1:
            self._wait(first * self._n + handles[:-n], (first + 1) * self._n + handles[:-n])
        return home + first * self._n

    def later(self, handles: Handles, n_steps: Any) -> Handles:
        """Return the ops so many steps after those of a relay or of repeated computes; an axis of steps comes first."""
        found: Handles = handles + np.reshape(n_steps, (-1, *[1] * handles.ndim)) * self._n
        return found

    def flow(self, src: Ids, dst: Ids, cost: int, reason: str, step: int = 0, call: str | None = None) -> Handles:
        """Add one flow per pair of chips, along the network's route; ``call`` is one of `LIBRARY_CALLS`."""
        sends = self._sends(src, dst)
        return self._add_sends(sends, 1, cost, reason, step, call) * self._n + sends.home

    def relay(
        self,
        src: Ids,
        dst: Ids,
        n_steps: int,
        cost: int,
        reason: str,
        step: int = 0,
        call: str | None = None,
        *,
        in_order: bool,
    ) -> Handles:
        """Send ``n_steps`` times from each chip to its next one; return the first sends.

        Each chip receives from one other. From the second step on, a send waits for what the chip received in the step
        before and, ``in_order``, for the chip's send of that step.
        """
        sends = self._sends(src, dst)
        assert sends.n_slots == 1
        first = self._add_sends(sends, n_steps, cost, reason, step, call)
        if n_steps > 1:
            before = np.empty(self._n, np.int64)
            before[dst.ravel()] = src.ravel()
            waits = [before[sends.kept], sends.kept][: 1 + in_order]
            slots = (first + np.arange(n_steps)[:, None, None]) * self._n
            pred = slots[:-1] + np.stack(waits)
            succ = np.broadcast_to(slots[1:] + sends.kept, pred.shape)
            self._wait(pred.ravel(), succ.ravel())
        return first * self._n + sends.home

    def exchange(
        self,
        chips: Ids,
        after: list[Handles],
        digits: tuple[int, ...],
        cost: int,
        reason: str,
        step: int = 0,
        call: str | None = None,
    ) -> Handles:
        """Send from every member of a group to every other at once; return what each receives, all of it.

        ``chips`` and each of ``after``, which sends wait for, have shape (n_groups, size). ``digits``, factors of
        ``size``, number a member's peers by the distance in each digit of its place, which turning any of them leaves
        alone.
        """
        size = chips.shape[1]
        home, place = chips.ravel(), np.arange(chips.size, dtype=np.int32)
        group, member = np.zeros(self._n, np.int32), np.zeros(self._n, np.int32)
        group[home], member[home] = place // size, place % size
        exchange = Exchange(self.n_slots, chips, digits, group, member)
        (at,) = self._keep(home, place)
        dst, slots = receivers_and_slots(exchange, home[at])
        src, dst = np.repeat(home[at], size - 1), dst.ravel()
        found, costs = self.network.routes(src, dst), np.full(len(src), cost, np.int32)
        routes, sent = (
            (np.diff(found.indptr), found.links, self._latency(found.latency, cost, call)),
            slots * self._n + home[at][:, None],
        )
        handles = sent.ravel() - self.n_slots * self._n
        self._add(FLOW, (src, dst, costs), routes, reason, [step], handles, size - 1)
        for pred in after:
            self._wait(np.broadcast_to(pred.ravel()[at][:, None], sent.shape).ravel(), sent.ravel())
        self._exchanges.append(exchange)
        return -1 - ((len(self._exchanges) - 1) * self._n + chips.astype(np.int64))

    def edge(self, preds: Handles, succs: Handles) -> None:
        """Let ``succs[i]`` wait for ``preds[i]`` (shapes are broadcast against each other)."""
        if preds.shape != succs.shape:
            preds, succs = np.broadcast_arrays(preds, succs)
        self._wait(*self._keep(succs % self._n, preds, succs))

    def entry(self, ops: Handles, chips: Ids) -> None:
        """Declare ops that wait for what the block before delivers to their chip."""
        ops, chips = self._keep(ops % self._n, ops, chips)
        self._entry[0].append(chips)
        self._entry[1].append(ops)

    def exit(self, ops: Handles, chips: Ids) -> None:
        """Declare ops whose ends deliver this block's result to a chip."""
        ops, chips = self._delivered(*self._keep(chips, ops, chips))
        self._exit[0].append(chips)
        self._exit[1].append(ops)

    def build(self) -> Block:
        """Return the block."""
        n_each = [tag[0] for tag in self._tags]
        kind, prio, reason, step = (np.repeat([tag[i] for tag in self._tags], n_each) for i in range(1, 5))
        src, dst, cost = (flat([part[i] for part in self._ops]) for i in range(3))
        length, links, latency = (flat([part[i] for part in self._routes], t) for i, t in enumerate(_ROUTE_TYPES))
        handle = flat(self._handles, np.int64)
        orbit, link_orbit, n_orbits = self.symmetry.chip_orbit, self.symmetry.link_orbit, len(self.symmetry.chips)

        def place(handles: Handles) -> Handles:
            if self._whole:
                return handles
            placed: Handles = handles // self._n * n_orbits + orbit[handles % self._n]
            return placed

        number = np.zeros(self.n_slots * n_orbits, np.int32)
        number[place(handle)] = np.arange(len(handle))

        def ops(handles: list[Handles]) -> Ids:
            return number[place(flat(handles, np.int64))]

        flows = np.flatnonzero(kind == FLOW).astype(np.int32)
        return Block(
            kind=kind.astype(np.int8),
            src=orbit[src],
            dst=orbit[dst],
            cost=cost,
            latency=latency,
            prio=prio.astype(np.int32),
            reason=reason.astype(np.int8),
            step=step.astype(np.int32),
            route_length=length,
            route_links=link_orbit[links],
            route_count=np.ones(len(links)),
            pred=ops(self._edges[0]),
            succ=ops(self._edges[1]),
            entry_chip=orbit[flat(self._entry[0])],
            entry_op=ops(self._entry[1]),
            exit_chip=orbit[flat(self._exit[0])],
            exit_op=ops(self._exit[1]),
            leave_chip=orbit[src[flows]],
            leave_op=flows,
            arrive_chip=orbit[dst[flows]],
            arrive_op=flows,
            n_prio=self.n_prio,
            handle=handle,
        )

    def _add_sends(self, sends: Sends, n_steps: int, cost: int, reason: str, step: int, call: str | None) -> int:
        first, costs = self.n_slots, np.full(len(sends.kept), cost, np.int32)
        src, dst, costs, length, links, latency = (
            each_step(a, n_steps)
            for a in (sends.src, sends.dst, costs, sends.length, sends.links, self._latency(sends.latency, cost, call))
        )
        # With several slots, homes count on from slot to slot.
        handles = (np.arange(n_steps)[:, None] * self._n + sends.kept).ravel()
        steps, n_slots = range(step, step + n_steps), max(n_steps, sends.n_slots)
        self._add(FLOW, (src, dst, costs), (length, links, latency), reason, steps, handles, n_slots)
        return first

    def _add(
        self,
        kind: int,
        ops: tuple[Ids, Ids, Ids],
        routes: tuple[NDArray[np.int64], Ids, Ids],
        reason: str,
        steps: Sequence[int],
        home: NDArray[Any],
        n_slots: int,
    ) -> None:
        """Keep ops given by source, destination and cost, as many of each step; homes count on from slot to slot."""
        n = len(ops[0]) // len(steps)
        for step in steps:
            self._tags.append((n, kind, self.n_prio if kind == COMPUTE else 0, REASON[reason], step))
            self.n_prio += kind == COMPUTE
        self._ops.append(ops)
        self._routes.append(routes)
        self._handles.append(self.n_slots * self._n + home.astype(np.int64))
        self.n_slots += n_slots

    def _sends(self, src: Ids, dst: Ids) -> Sends:
        given = self._given.get((id(src), id(dst)))
        if given is None:
            key = b"".join((src.tobytes(), dst.tobytes(), str(src.shape).encode()))
            if key not in self._known:
                home, n_slots = homes_of(src, dst, self._n)
                kept, kept_src, kept_dst = self._keep(home % self._n, home, src, dst)
                routes = self.network.routes(kept_src, kept_dst)
                ends = (kept, kept_src, kept_dst)
                self._known[key] = Sends(
                    (src, dst), home, n_slots, *ends, np.diff(routes.indptr), routes.links, routes.latency
                )
            # The arrays are kept, so that their ids stay theirs.
            given = self._given[id(src), id(dst)] = self._known[key]._replace(pairs=(src, dst))
        return given

    def _latency(self, of_route: Ids, cost: int, call: str | None) -> Ids:
        if not self.library_calls:
            return of_route
        return of_route + np.int32(latency_block(cost, call) * len(self.network.latencies()))

    def _keep(self, home: NDArray[Any], *arrays: NDArray[Any]) -> list[NDArray[Any]]:
        """Flatten arrays, and leave out what is at home on a chip that another one stands for."""
        if self._whole:
            return [array.ravel() for array in arrays]
        is_kept = self._is_kept[home]
        return [array[is_kept] for array in arrays]

    def _wait(self, preds: Handles, succs: Handles) -> None:
        preds, succs = self._delivered(preds, succs)
        self._edges[0].append(preds)
        self._edges[1].append(succs)

    def _delivered(self, ops: Handles, beside: NDArray[Any]) -> tuple[Handles, NDArray[Any]]:
        """Replace what exchanges deliver by the flows, and repeat what stands beside it."""
        if ops.size == 0 or ops.item(0) >= 0:
            return ops, beside
        which, chip = np.divmod(-1 - ops, self._n)
        exchange = self._exchanges[which[0]]
        assert (which == which[0]).all()
        senders, slots = senders_and_slots(exchange, chip)
        return (slots * self._n + senders).ravel(), np.repeat(beside, slots.shape[1])
