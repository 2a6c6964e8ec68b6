"""Exact reductions of a structure: symmetry classes of its blocks, and runs of repeated layers.

Refining the distinct blocks side by side is enough: an entry waits for what the block before delivers to its chip,
which the chip's colour stands for, and a chip's colour covers what it delivers in every block. So a partition that
is equitable over the blocks stays so over any chain of them, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine.arrays import COMPUTE
from g5cp_vec.engine.csr import group_by
from g5cp_vec.engine.quotient import Parts, class_edges, class_routes, first_members, is_equitable, refine
from g5cp_vec.errors import SimulationError
from g5cp_vec.mapping.graph import Block, Ids
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
    """Lay the distinct blocks side by side; also return the first op of each.

    In blocks of orbits, a link that some elements of the symmetry leave in place is crossed by as many members of a
    flow's orbit.
    """
    blocks, network, symmetry = structure.blocks, structure.network, structure.symmetry
    n_each = [len(b.kind) for b in blocks]
    first = np.concatenate([[0], np.cumsum(n_each)]).astype(np.int64)
    n_ops, n_chips, n_links = int(first[-1]), len(symmetry.chips), len(symmetry.links)

    def flat(name: str, *, shifted: bool = False) -> NDArray[np.int32]:
        arrays = [getattr(b, name) + (first[i] if shifted else 0) for i, b in enumerate(blocks)]
        return np.concatenate(arrays).astype(np.int32)

    kind, src, cost, latency, prio = (flat(name) for name in ("kind", "src", "cost", "latency", "prio"))
    label = np.repeat(np.arange(len(blocks), dtype=np.int64), n_each)
    for column in (kind, prio, cost, latency + 1):
        label = label * (int(column.max(initial=0)) + 1) + column
    route_indptr = np.zeros(n_ops + 1, np.int64)
    np.cumsum(flat("route_length"), out=route_indptr[1:])
    route_links = flat("route_links")
    route_ops, crossed = np.repeat(np.arange(n_ops, dtype=np.int32), np.diff(route_indptr)), route_links
    if symmetry.order > 1:
        times = symmetry.n_fixing[route_links]
        route_ops, crossed = np.repeat(route_ops, times), np.repeat(route_links, times)
    ops = np.arange(n_ops, dtype=np.int32)
    computes = ops[kind == COMPUTE]
    pairs: dict[str, tuple[NDArray[np.int64], Ids]] = {
        "pred": group_by(n_ops, flat("succ", shifted=True), flat("pred", shifted=True)),
        "entry": group_by(n_ops, flat("entry_op", shifted=True), flat("entry_chip")),
        "chip": group_by(n_chips, src[computes], computes),
        "exit": group_by(n_chips, flat("exit_chip"), flat("exit_op", shifted=True)),
        "link": group_by(n_links, crossed, route_ops),
    }
    parts = Parts(
        label, kind.astype(np.int8), src,
        *pairs["pred"], *pairs["entry"], route_indptr, route_links,
        *pairs["chip"], *pairs["exit"], *pairs["link"],
        network.link_capacity[symmetry.links].astype(np.int32), network.chip_rate[symmetry.chips],
    )  # fmt: skip
    return parts, first


def find_classes(structure: Structure) -> Quotient:
    """Return the symmetry classes of a structure.

    Raises
    ------
    SimulationError
        No seed of the hashes gave an equitable partition (never seen).
    """
    parts, first = _side_by_side(structure)
    for seed in range(8):
        with np.errstate(over="ignore"):  # hashes wrap, which numpy minds where nothing is compiled
            op_colour, chip_colour, link_colour = refine(parts, seed)
        if is_equitable(parts, op_colour, chip_colour, link_colour):
            return _quotient(structure, parts, first, op_colour, chip_colour, link_colour)
    raise SimulationError("symmetry classes: the partition is not equitable; simulate with --fidelity full")


def _quotient(
    structure: Structure,
    parts: Parts,
    first: NDArray[np.int64],
    op_colour: Ids,
    chip_colour: Ids,
    link_colour: Ids,
) -> Quotient:
    first_op, chips, links = first_members(op_colour), first_members(chip_colour), first_members(link_colour)
    pred, succ = class_edges(parts, op_colour, first_op)
    route_indptr, route_links, route_count = class_routes(parts, op_colour, links, len(first_op))
    # Colours are numbered in order of appearance, so the classes of a block are consecutive.
    bounds = np.searchsorted(first_op, first)
    represents = np.full(len(structure.symmetry.chips), -1, np.int32)
    represents[chips] = np.arange(len(chips))
    blocks, op_class = [], []
    for i, block in enumerate(structure.blocks):
        low, high = int(bounds[i]), int(bounds[i + 1])
        own = op_colour[first[i] : first[i + 1]] - np.int32(low)
        members = first_op[low:high] - first[i]
        edges = slice(*np.searchsorted(succ, [low, high]))
        routes = slice(int(route_indptr[low]), int(route_indptr[high]))
        blocks.append(
            block._replace(
                **{f: getattr(block, f)[members] for f in ("kind", "cost", "latency", "prio", "reason", "step")},
                src=chip_colour[block.src[members]],
                dst=chip_colour[block.dst[members]],
                route_length=np.diff(route_indptr[low : high + 1]),
                route_links=route_links[routes],
                route_count=route_count[routes],
                pred=pred[edges] - np.int32(low),
                succ=succ[edges] - np.int32(low),
                **_entries(block, members, chip_colour, own),
                **_pairs(block, "exit", represents, own, once=True),
                **_pairs(block, "leave", represents, own, once=True),
                **_pairs(block, "arrive", represents, own, once=False),
            )
        )
        op_class.append(own)
    lowest_chips, lowest_links = structure.symmetry.chips[chips], structure.symmetry.links[links]
    capacity = structure.network.link_capacity[lowest_links]
    return Quotient(blocks, op_class, lowest_chips, lowest_links, chips, links, capacity)


def _entries(block: Block, members: Ids, chip_colour: Ids, op_class: Ids) -> dict[str, Any]:
    """Return what each class waits for at its block's entry: the chip classes that its first member names."""
    is_member = np.zeros(len(block.kind), np.bool_)
    is_member[members] = True
    kept = is_member[block.entry_op]
    return _distinct_pairs("entry", chip_colour[block.entry_chip[kept]], op_class[block.entry_op[kept]])


def _pairs(block: Block, name: str, represents: Ids, op_class: Ids, *, once: bool) -> dict[str, Any]:
    """Return the (chip, op) pairs of the chips that stand for their class, as classes; distinct ones if ``once``.

    A chip may receive several flows of one class at once: each counts where their time is summed.
    """
    chips, ops = getattr(block, f"{name}_chip"), getattr(block, f"{name}_op")
    kept = represents[chips] >= 0
    chip_class, classes = represents[chips[kept]], op_class[ops[kept]]
    if once:
        return _distinct_pairs(name, chip_class, classes)
    return {f"{name}_chip": chip_class, f"{name}_op": classes}


def _distinct_pairs(name: str, chip_class: Ids, op_class: Ids) -> dict[str, Any]:
    n = int(op_class.max(initial=0)) + 1
    distinct = np.unique(chip_class.astype(np.int64) * n + op_class)
    return {f"{name}_chip": (distinct // n).astype(np.int32), f"{name}_op": (distinct % n).astype(np.int32)}
