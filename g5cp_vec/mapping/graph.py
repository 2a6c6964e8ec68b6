"""Operation graphs as arrays, built from blocks.

A deployment repeats a few distinct layers, so a graph is a chain of *blocks* (embedding, a layer, a transfer
between stages, the head). A block is built once, for all ranks of its stage at a time, with ops numbered from 0;
the chain copies it as often as it occurs and joins consecutive blocks chip by chip: every op that a block
declares as an *entry* of a chip waits for every op that the block before declares as an *exit* of that chip.

Op order, which users of the arrays may rely on: block by block, within a block as created, within one creation
in the order of the chips given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from g5cp_vec.engine.arrays import COMPUTE, FLOW, NONE, Graph
from g5cp_vec.mapping.blocks import Block, Blocks, Handles, Ids
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
from g5cp_vec.mapping.sends import Exchange, Sends, flat, homes_of
from g5cp_vec.mapping.symmetry import Symmetry, no_symmetry

__all__ = [
    "REASON", "REASONS", "Block", "BlockBuilder", "Blocks", "ComputeKey", "CostKeys", "DurationKey", "Handles",
    "Ids", "MessageKey", "OpGraph", "split_rate",
]  # fmt: skip


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


_NO_LINKS = np.zeros(0, np.int32)


class BlockBuilder:
    """Collects the ops of blocks, one block after another.

    An op has a *handle*: slot * n_chips + home. A creation opens a slot, several for repeated sends, in which an op's
    home is its own: the chip that computes or sends, or the one that receives where chips send more than once. Handles
    have the shape of the chips given. Negative ones stand for all that an exchange delivers to a chip.

    Under a symmetry only the ops at home on the lowest chip of each orbit are kept, and the blocks built are ones of
    orbits: their chips and links are positions in ``symmetry.chips`` and ``symmetry.links``.
    ``library_calls``: whether messages and the calls of `LIBRARY_CALLS` have latencies of their own.
    """

    def __init__(self, network: Network, symmetry: Symmetry | None = None, *, library_calls: bool = False) -> None:
        self.network = network
        self.library_calls = library_calls
        self.symmetry = symmetry or no_symmetry(network)
        self.n_slots = 0
        self._n = network.n_chips
        self._whole = self.symmetry.order == 1
        self._is_kept = np.zeros(self._n, np.bool_)
        self._is_kept[self.symmetry.chips] = True
        self._n_ops = 0
        self._first_op: list[int] = []
        self._n_prio: list[int] = []
        # What the ops of a creation have in common, and the ops of each of its steps.
        self._creations: list[tuple[int, ...]] = []
        self._ops: list[Sends] = []
        # Layers are alike: what creations do between the same chips is worked out once.
        self._sends: dict[tuple[bytes, bytes, tuple[int, ...]], Sends] = {}
        self._computing: dict[tuple[bytes, tuple[int, ...]], Sends] = {}
        self._exchanging: dict[tuple[bytes, tuple[int, ...]], tuple[Exchange, Sends]] = {}
        self._relays: dict[tuple[int, int, bool], tuple[Handles, Handles]] = {}
        # First slot, as a handle, of every exchange.
        self._exchanges: list[tuple[int, Exchange]] = []
        self._edges: tuple[list[Handles], list[Handles]] = ([], [])
        self._entry: tuple[list[Ids], list[Handles]] = ([], [])
        self._exit: tuple[list[Ids], list[Handles]] = ([], [])

    def begin(self) -> int:
        """Begin the next block, to which all that follows belongs; return its number."""
        self._first_op.append(self._n_ops)
        self._n_prio.append(0)
        return len(self._n_prio) - 1

    def compute(self, chips: Ids, cost: int, reason: str, step: int = 0, n_steps: int = 1) -> Handles:
        """Add compute ops, next in every chip's program order; ``cost`` is that at full speed.

        Each of ``n_steps`` on a chip waits for the one before; the first of them are returned.
        """
        key = (chips.tobytes(), chips.shape)
        ops = self._computing.get(key)
        if ops is None:
            (kept,) = self._keep(chips, chips)
            home, n = chips.astype(np.int64), len(kept)
            routes = (np.zeros(n, np.int64), _NO_LINKS, np.full(n, NONE, np.int32))
            ops = self._computing[key] = Sends(home, 1, kept.astype(np.int64), kept, kept, *routes)
        first = self._add(COMPUTE, ops, n_steps, cost, reason, step)
        if n_steps > 1:
            handles = (np.arange(first, first + n_steps * self._n, self._n)[:, None] + ops.kept).ravel()
            n = len(ops.kept)
            self._wait(handles[:-n], handles[n:])
        return ops.home + first

    def later(self, handles: Handles, n_steps: ArrayLike) -> Handles:
        """Return the ops so many steps after those of a relay or of repeated computes; axes of steps come first."""
        found: Handles = np.add.outer(np.asarray(n_steps) * self._n, handles)
        return found

    def flow(self, src: Ids, dst: Ids, cost: int, reason: str, step: int = 0, call: str | None = None) -> Handles:
        """Add one flow per pair of chips, along the network's route; ``call`` is one of `LIBRARY_CALLS`."""
        sends = self._between(src, dst)
        return self._add(FLOW, sends, 1, cost, reason, step, call) + sends.home

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
        sends = self._between(src, dst)
        assert sends.n_slots == 1
        first = self._add(FLOW, sends, n_steps, cost, reason, step, call)
        if n_steps > 1:
            key = (id(sends), n_steps, in_order)
            if key not in self._relays:
                before = np.empty(self._n, np.int64)
                before[dst.ravel()] = src.ravel()
                waits = np.stack([before[sends.kept], sends.kept][: 1 + in_order])
                slots = np.arange(0, n_steps * self._n, self._n)[:, None, None]
                succ = np.broadcast_to(slots[1:] + sends.kept, (n_steps - 1, *waits.shape))
                self._relays[key] = ((slots[:-1] + waits).ravel(), succ.ravel())
            pred, succ = self._relays[key]
            self._wait(pred + first, succ + first)
        return first + sends.home

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
        n_peers, key = chips.shape[1] - 1, (chips.tobytes(), digits)
        if key not in self._exchanging:
            exchange = Exchange(chips, digits, self._n)
            (home,) = self._keep(chips, chips)
            dst, handles = exchange.sent(home)
            ends = (home.repeat(n_peers), dst.ravel())
            found = self.network.routes(*ends)
            sends = Sends(handles, n_peers, handles.ravel(), *ends, np.diff(found.indptr), found.links, found.latency)
            self._exchanging[key] = (exchange, sends)
        exchange, sends = self._exchanging[key]
        first = self._add(FLOW, sends, 1, cost, reason, step, call)
        for pred in after:
            (kept,) = self._keep(chips, pred)
            delivered = self._delivered(kept)
            self._edges[0].append(delivered.repeat(n_peers, axis=0).ravel())
            self._edges[1].append((first + sends.kept).repeat(delivered.shape[1]))
        self._exchanges.append((first, exchange))
        return -1 - ((len(self._exchanges) - 1) * self._n + chips.astype(np.int64))

    def edge(self, preds: Handles, succs: Handles, n_steps: int = 1) -> None:
        """Let ``succs[i]`` wait for ``preds[i]`` (shapes are broadcast against each other).

        So do those of ``n_steps`` - 1 later steps of both (see `later`).
        """
        if n_steps != 1:
            preds, succs = (self.later(side, np.arange(n_steps)) for side in (preds, succs))
        if preds.shape != succs.shape:
            preds, succs = np.broadcast_arrays(preds, succs)
        self._wait(*self._keep(succs, preds, succs))

    def entry(self, ops: Handles, chips: Ids) -> None:
        """Declare ops that wait for what the block before delivers to their chip."""
        ops, chips = self._keep(ops, ops, chips)
        self._entry[0].append(chips)
        self._entry[1].append(ops)

    def exit(self, ops: Handles, chips: Ids) -> None:
        """Declare ops whose ends deliver this block's result to a chip."""
        ops, chips = self._keep(chips, ops, chips)
        delivered = self._delivered(ops)
        self._exit[0].append(chips.repeat(delivered.shape[1]))
        self._exit[1].append(delivered.ravel())

    def build(self) -> Blocks:
        """Return the blocks."""
        creations = np.array(self._creations, np.int64)
        n_steps = creations[:, 0]
        _, n_each, kind, reason, step, prio, cost, shift, slot = creations.repeat(n_steps, axis=0).T
        within = np.arange(len(kind)) - (np.cumsum(n_steps) - n_steps).repeat(n_steps)

        def per_op(of_step: NDArray[np.int64], dtype: type) -> NDArray[Any]:
            return of_step.astype(dtype).repeat(n_each)

        def joined(name: str, dtype: type = np.int32) -> NDArray[Any]:
            return flat([getattr(ops, name) for ops in self._ops], dtype)

        kinds, costs, latency = per_op(kind, np.int8), per_op(cost, np.int32), joined("latency")
        src, dst, links = joined("src"), joined("dst"), joined("links")
        if self.network.chip_rate.any():
            costs += self.network.chip_rate[src] * (kinds == COMPUTE)
        if self.library_calls:
            latency += per_op(shift, np.int32)
        handle = joined("kept", np.int64) + per_op(slot + within * self._n, np.int64)
        orbit, n_orbits = self.symmetry.chip_orbit, len(self.symmetry.chips)

        def place(handles: Handles) -> Handles:
            if self._whole:
                return handles
            placed: Handles = handles // self._n * n_orbits + orbit[handles % self._n]
            return placed

        number = np.zeros(self.n_slots * n_orbits, np.int32)
        number[place(handle)] = np.arange(len(handle), dtype=np.int32)

        def ops(handles: list[Handles]) -> Ids:
            return number[place(flat(handles, np.int64))]

        if not self._whole:
            src, dst, links = orbit.take(src), orbit.take(dst), self.symmetry.link_orbit.take(links)
        flows = np.flatnonzero(kinds == FLOW).astype(np.int32)
        block = Block(
            kind=kinds,
            src=src,
            dst=dst,
            cost=costs,
            latency=latency,
            prio=per_op(prio + within * (kind == COMPUTE), np.int32),
            reason=per_op(reason, np.int8),
            step=per_op(step + within, np.int32),
            route_length=joined("length", np.int64),
            route_links=links,
            route_count=np.ones(len(links)),
            pred=ops(self._edges[0]),
            succ=ops(self._edges[1]),
            entry_chip=orbit.take(flat(self._entry[0])),
            entry_op=ops(self._entry[1]),
            exit_chip=orbit.take(flat(self._exit[0])),
            exit_op=ops(self._exit[1]),
            leave_chip=src.take(flows),
            leave_op=flows,
            arrive_chip=dst.take(flows),
            arrive_op=flows,
            n_prio=sum(self._n_prio),
            handle=handle,
        )
        return Blocks(block, np.array([*self._first_op, self._n_ops], np.int64), self._n_prio)

    def _add(
        self, kind: int, ops: Sends, n_steps: int, cost: int, reason: str, step: int, call: str | None = None
    ) -> int:
        """Keep ops, as many of each step; return the first slot as a handle. Homes count on from slot to slot."""
        first, prio, shift = self.n_slots * self._n, 0, 0
        if kind == COMPUTE:
            prio = self._n_prio[-1]
            self._n_prio[-1] += n_steps
        elif self.library_calls:
            shift = latency_block(cost, call) * len(self.network.latencies())
        self._creations.append((n_steps, len(ops.kept), kind, REASON[reason], step, prio, cost, shift, first))
        self._ops += [ops] * n_steps
        self._n_ops += n_steps * len(ops.kept)
        self.n_slots += max(n_steps, ops.n_slots)
        return first

    def _between(self, src: Ids, dst: Ids) -> Sends:
        key = (src.tobytes(), dst.tobytes(), src.shape)
        sends = self._sends.get(key)
        if sends is None:
            home, n_slots = homes_of(src, dst, self._n)
            kept, kept_src, kept_dst = self._keep(home, home, src, dst)
            routes = self.network.routes(kept_src, kept_dst)
            route = (np.diff(routes.indptr), routes.links, routes.latency)
            sends = self._sends[key] = Sends(home, n_slots, kept, kept_src, kept_dst, *route)
        return sends

    def _keep(self, home: NDArray[Any], *arrays: NDArray[Any]) -> list[NDArray[Any]]:
        """Flatten arrays, and leave out what is at home (chips or handles) on a chip that another one stands for."""
        if self._whole:
            return [array.ravel() for array in arrays]
        kept = self._is_kept.take(home % self._n).ravel().nonzero()[0]
        return [array.ravel().take(kept) for array in arrays]

    def _wait(self, preds: Handles, succs: Handles) -> None:
        if preds.size and preds.item(0) < 0:
            delivered = self._delivered(preds)
            preds, succs = delivered.ravel(), succs.repeat(delivered.shape[1])
        self._edges[0].append(preds)
        self._edges[1].append(succs)

    def _delivered(self, ops: Handles) -> Handles:
        """Return the ops that handles stand for, shape (n_handles, number): flows where exchanges deliver."""
        if ops.size == 0 or ops.item(0) >= 0:
            return ops[:, None]
        which, chip = np.divmod(-1 - ops, self._n)
        first, exchange = self._exchanges[which[0]]
        assert (which == which[0]).all()
        delivered: Handles = first + exchange.received(chip)
        return delivered
