"""Exact reductions of a structure: symmetry classes of its blocks, and runs of repeated layers.

Refining the distinct blocks side by side is enough: an entry waits for what the block before delivers to its chip,
which the chip's colour stands for, and a chip's colour covers what it delivers in every block. So a partition that
is equitable over the blocks stays so over any chain of them, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine.arrays import COMPUTE
from g5cp_vec.engine.csr import group_by
from g5cp_vec.engine.quotient import Parts, class_edges, class_routes, first_members, is_equitable, refine
from g5cp_vec.errors import SimulationError
from g5cp_vec.mapping.graph import Block, Blocks, Ids
from g5cp_vec.mapping.structure import Structure

# Longest unit of a repeated pattern of layers that is looked for (5 local + 1 global attention layers, say).
MAX_UNIT = 12


@dataclass(frozen=True, slots=True)
class Quotient:
    """Symmetry classes of a structure.

    Attributes
    ----------
    blocks : list of Block
        One op per class; chips and links are classes too.
    op_class : list of ndarray of int32
        For each block, the class (number within the quotient block) of every op.
    chips, links : ndarrays of int32
        First member of every chip and link class.
    chip_orbits, link_orbits : ndarrays of int32
        Their orbits under the structure's symmetry; themselves without one.
    link_capacity : ndarray of int32
    """

    blocks: list[Block]
    op_class: list[Ids]
    chips: Ids
    links: Ids
    chip_orbits: Ids
    link_orbits: Ids
    link_capacity: Ids


class Run(NamedTuple):
    """A stretch of the chain that repeats: ``unit`` blocks from place ``first`` on, ``repeats`` times."""

    first: int
    unit: int
    repeats: int


def find_runs(chain: list[int]) -> list[Run]:
    """Find repeated stretches, left to right, each as long as can be with the shortest unit."""
    runs, at = [], 0
    while at < len(chain):
        best = Run(at, 1, 1)
        for unit in range(1, min(MAX_UNIT, (len(chain) - at) // 2) + 1):
            if best.repeats > 1 and unit % best.unit == 0 and unit <= best.unit * best.repeats:
                continue  # a longer unit of the same pattern repeats no further
            repeats = 1
            while chain[at + repeats * unit : at + (repeats + 1) * unit] == chain[at : at + unit]:
                repeats += 1
            if repeats > 1 and unit * repeats > best.unit * best.repeats:
                best = Run(at, unit, repeats)
        if best.repeats > 1:
            runs.append(best)
        at += best.unit * best.repeats
    return runs


def _side_by_side(structure: Structure) -> tuple[Parts, NDArray[np.int64]]:
    """Return what decides the colours of the distinct blocks' ops, chips and links, and the first op of each block.

    In blocks of orbits, a link that some elements of the symmetry leave in place is crossed by as many members of a
    flow's orbit.
    """
    ops, first_op, _ = structure.side_by_side
    network, symmetry = structure.network, structure.symmetry
    n_ops, n_chips, n_links = len(ops.kind), len(symmetry.chips), len(symmetry.links)
    label = np.repeat(np.arange(len(first_op) - 1), np.diff(first_op))
    for column in (ops.kind, ops.prio, ops.cost, ops.latency + 1):
        label *= int(column.max(initial=0)) + 1
        label += column
    route_indptr = np.zeros(n_ops + 1, np.int64)
    np.cumsum(ops.route_length, out=route_indptr[1:])
    numbers = np.arange(n_ops, dtype=np.int32)
    route_ops, crossed = numbers.repeat(ops.route_length), ops.route_links
    if symmetry.order > 1:
        times = symmetry.n_fixing[crossed]
        route_ops, crossed = route_ops.repeat(times), crossed.repeat(times)
    computes = (ops.kind == COMPUTE).nonzero()[0].astype(np.int32)
    grouped: Callable[[int, Ids, Ids], tuple[NDArray[np.int64], Ids]] = group_by
    parts = Parts(
        label, ops.kind, ops.src,
        *grouped(n_ops, ops.succ, ops.pred), *grouped(n_ops, ops.entry_op, ops.entry_chip),
        route_indptr, ops.route_links,
        *grouped(n_chips, ops.src.take(computes), computes), *grouped(n_chips, ops.exit_chip, ops.exit_op),
        *grouped(n_links, crossed, route_ops),
        network.link_capacity[symmetry.links], network.chip_rate[symmetry.chips],
    )  # fmt: skip
    return parts, first_op


def find_classes(structure: Structure) -> Quotient:
    """Return the symmetry classes of a structure.

    Raises
    ------
    SimulationError
        No seed of the hashes gave an equitable partition (never seen).
    """
    parts, _ = _side_by_side(structure)
    for seed in range(8):
        with np.errstate(over="ignore"):  # hashes wrap, which numpy minds where nothing is compiled
            op_colour, chip_colour, link_colour = refine(parts, seed)
        if is_equitable(parts, op_colour, chip_colour, link_colour):
            return _quotient(structure, parts, op_colour, chip_colour, link_colour)
    raise SimulationError("symmetry classes: the partition is not equitable; simulate with --fidelity full")


def _quotient(structure: Structure, parts: Parts, op_colour: Ids, chip_colour: Ids, link_colour: Ids) -> Quotient:
    ops, first_op, n_prio = structure.side_by_side
    members, chips, links = first_members(op_colour), first_members(chip_colour), first_members(link_colour)
    pred, succ = class_edges(parts, op_colour, members)
    route_indptr, route_links, route_count = class_routes(parts, op_colour, links, len(members))
    # Colours are numbered in order of appearance, so the classes of a block are consecutive.
    first_class = np.searchsorted(members, first_op)
    block = np.arange(len(n_prio)).repeat(np.diff(first_class))
    quotient = ops._replace(
        **{f: getattr(ops, f).take(members) for f in ("kind", "cost", "latency", "prio", "reason", "step", "handle")},
        src=chip_colour.take(ops.src.take(members)),
        dst=chip_colour.take(ops.dst.take(members)),
        route_length=np.diff(route_indptr),
        route_links=route_links,
        route_count=route_count,
        pred=pred,
        succ=succ,
        **_pairs(ops, op_colour, chip_colour, members, chips, block),
    )
    own = op_colour - first_class.astype(np.int32)[:-1].repeat(np.diff(first_op))
    lowest_chips, lowest_links = structure.symmetry.chips[chips], structure.symmetry.links[links]
    return Quotient(
        blocks=Blocks(quotient, first_class, n_prio).split(),
        op_class=np.split(own, first_op[1:-1]),
        chips=lowest_chips,
        links=lowest_links,
        chip_orbits=chips,
        link_orbits=links,
        link_capacity=structure.network.link_capacity[lowest_links],
    )


def _pairs(
    ops: Block, op_colour: Ids, chip_colour: Ids, members: Ids, chips: Ids, block: NDArray[np.int64]
) -> dict[str, Any]:
    """Return the (chip, op) pairs of classes, given the first op and chip of each, and every op class's block."""
    # What a class waits for at its block's entry: the chip classes that its first member names.
    is_first = np.zeros(len(op_colour), np.bool_)
    is_first[members] = True
    named = is_first.take(ops.entry_op).nonzero()[0]
    entry = chip_colour.take(ops.entry_chip.take(named)), op_colour.take(ops.entry_op.take(named))
    represents = np.full(len(chip_colour), -1, np.int32)
    represents[chips] = np.arange(len(chips))

    def at_first(op_chip: Ids, of_op: Ids) -> tuple[Ids, Ids]:
        """Return the pairs of the chips that stand for their class."""
        chip_class = represents.take(op_chip)
        kept = (chip_class >= 0).nonzero()[0]
        return chip_class.take(kept), op_colour.take(of_op.take(kept))

    pairs = {
        "entry": _distinct(*entry, block),
        "exit": _distinct(*at_first(ops.exit_chip, ops.exit_op), block),
        "leave": _distinct(*at_first(ops.leave_chip, ops.leave_op), block),
        # A chip may receive several flows of one class at once: each counts where their time is summed.
        "arrive": at_first(ops.arrive_chip, ops.arrive_op),
    }
    return {f"{name}_{end}": pairs[name][i] for name in pairs for i, end in enumerate(("chip", "op"))}


def _distinct(chip_class: Ids, op_class: Ids, block: NDArray[np.int64]) -> tuple[Ids, Ids]:
    """Return distinct pairs, block by block and in each by chip and op; ``block`` is that of every class of ops."""
    n_ops, n_chips = len(block), int(chip_class.max(initial=0)) + 1
    place, op = np.divmod(np.unique((block.take(op_class) * n_chips + chip_class) * n_ops + op_class), n_ops)
    return (place % n_chips).astype(np.int32), op.astype(np.int32)
