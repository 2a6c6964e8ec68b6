"""Symmetry classes of ops, chips and links by colour refinement.

Two ops may share a colour when nothing that decides their times tells them apart: block, kind, place in the chip's
order, cost ids, the chip's colour, the set of predecessors' colours, the multiset of the route's link colours. A
chip's colour is the multiset of its ops' colours and of the colours it delivers to the next block; a link's is its
capacity id and the multiset of flows crossing it. What an entry waits for is the colour of its chip.

Ops are numbered topologically, so one sweep colours them all given chips and links; chips and links are then
refined and the sweep repeated until the number of colours stops growing. Hashes only propose: a last pass compares
every member with its class's first member, set against set, and says whether the partition is equitable.
If it is, all members of a class start and end together, because progressive filling freezes whole classes at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import COMPUTE


class Parts(NamedTuple):
    """Distinct blocks laid side by side, everything that decides colours.

    Attributes
    ----------
    op_label : ndarray of int64, shape (n_ops,)
        Dense id of (block, kind, priority, cost id, latency id): ops with different labels never share a colour.
    op_kind, op_chip : ndarrays of int8 and int32, shape (n_ops,)
    pred_indptr, pred_indices : CSR ops -> predecessors (smaller numbers)
    entry_indptr, entry_indices : CSR ops -> chips whose delivery they wait for
    route_indptr, route_indices : CSR ops -> links
    chip_indptr, chip_ops : CSR chips -> compute ops
    exit_indptr, exit_ops : CSR chips -> ops that deliver to the next block
    link_indptr, link_ops : CSR links -> flows crossing them
    link_label : ndarray of int32, shape (n_links,)
        Capacity ids.
    chip_label : ndarray of int32, shape (n_chips,)
        Rate ids.
    """

    op_label: NDArray[np.int64]
    op_kind: NDArray[np.int8]
    op_chip: NDArray[np.int32]
    pred_indptr: NDArray[np.int64]
    pred_indices: NDArray[np.int32]
    entry_indptr: NDArray[np.int64]
    entry_indices: NDArray[np.int32]
    route_indptr: NDArray[np.int64]
    route_indices: NDArray[np.int32]
    chip_indptr: NDArray[np.int64]
    chip_ops: NDArray[np.int32]
    exit_indptr: NDArray[np.int64]
    exit_ops: NDArray[np.int32]
    link_indptr: NDArray[np.int64]
    link_ops: NDArray[np.int32]
    link_label: NDArray[np.int32]
    chip_label: NDArray[np.int32]


@kernel
def _mix(x):
    """One round of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@kernel
def _sum_of(indptr, indices, row, colour, salt):
    """Order-free hash of a row's colours, each counted as often as it occurs."""
    total = np.uint64(0)
    for p in range(indptr[row], indptr[row + 1]):
        total += _mix(np.uint64(colour[indices[p]]) ^ salt)
    return total


@kernel
def _dense_id(h, table_hash, table_id, n_ids):
    """Id of a hash in an open-addressing table, a new one for a new hash; returns (id, number of ids)."""
    mask = np.uint64(len(table_hash) - 1)
    slot = h & mask
    while table_id[slot] >= 0:
        if table_hash[slot] == h:
            return table_id[slot], n_ids
        slot = (slot + np.uint64(1)) & mask
    table_hash[slot] = h
    table_id[slot] = n_ids
    return n_ids, n_ids + 1


@kernel
def _colour_ops(s, salt, chip_colour, link_colour, seen, table_hash, table_id, op_colour):
    """One topological sweep; returns the number of op colours."""
    table_id[:] = -1
    seen[:] = -1
    n_ids = np.int64(0)
    for op in range(len(s.op_label)):
        h = _mix(np.uint64(s.op_label[op]) ^ salt[0])
        if s.op_kind[op] == COMPUTE:
            h += _mix(np.uint64(chip_colour[s.op_chip[op]]) ^ salt[1])
        for p in range(s.pred_indptr[op], s.pred_indptr[op + 1]):
            colour = op_colour[s.pred_indices[p]]
            if seen[colour] != op:
                seen[colour] = op
                h += _mix(np.uint64(colour) ^ salt[2])
        h += _sum_of(s.entry_indptr, s.entry_indices, op, chip_colour, salt[3])
        h += _sum_of(s.route_indptr, s.route_indices, op, link_colour, salt[4])
        op_colour[op], n_ids = _dense_id(h, table_hash, table_id, n_ids)
    return n_ids


@kernel
def _colour_chips(s, salt, op_colour, table_hash, table_id, chip_colour):
    table_id[:] = -1
    n_ids = np.int64(0)
    for chip in range(len(chip_colour)):
        h = _mix(np.uint64(chip_colour[chip]) ^ salt[0])
        h += _sum_of(s.chip_indptr, s.chip_ops, chip, op_colour, salt[1])
        h += _sum_of(s.exit_indptr, s.exit_ops, chip, op_colour, salt[2])
        chip_colour[chip], n_ids = _dense_id(h, table_hash, table_id, n_ids)
    return n_ids


@kernel
def _colour_links(s, salt, op_colour, table_hash, table_id, link_colour):
    table_id[:] = -1
    n_ids = np.int64(0)
    for link in range(len(link_colour)):
        h = _mix(np.uint64(link_colour[link]) ^ salt[0])
        h += _sum_of(s.link_indptr, s.link_ops, link, op_colour, salt[1])
        link_colour[link], n_ids = _dense_id(h, table_hash, table_id, n_ids)
    return n_ids


@kernel
def _n_distinct(labels, table_hash, table_id):
    table_id[:] = -1
    n_ids = np.int64(0)
    for label in labels:
        _, n_ids = _dense_id(_mix(np.uint64(label)), table_hash, table_id, n_ids)
    return n_ids


@kernel(allocates=True, entry=True)
def refine(s, seed):
    """Colour ops, chips and links.

    Parameters
    ----------
    s : Parts
    seed : int
        Of the hashes; another seed only renames nothing and collides elsewhere.

    Returns
    -------
    op_colour, chip_colour, link_colour : ndarrays of int32
        Dense ids in order of first appearance.

    Notes
    -----
    O(rounds * (ops + edges + route entries)). Chips and links decide the ops' colours and are refined by them, so what
    was not refined in a round is not going to change. Colours are hashed by sums, with another salt for each way in
    which an op, a chip or a link knows them.
    """
    n_ops, n_chips, n_links = len(s.op_label), len(s.chip_label), len(s.link_label)
    salt = np.empty(5, np.uint64)
    for i in range(len(salt)):
        salt[i] = _mix(np.uint64(len(salt) * seed + i))
    size = 16
    while size < 2 * max(n_ops, n_chips, n_links):
        size *= 2
    table_hash, table_id = np.empty(size, np.uint64), np.empty(size, np.int32)
    op_colour, seen = np.zeros(n_ops, np.int32), np.empty(n_ops + 1, np.int32)
    chip_colour, link_colour = s.chip_label.copy(), s.link_label.copy()
    n_op_colours = -1
    n_others = _n_distinct(chip_colour, table_hash, table_id) + _n_distinct(link_colour, table_hash, table_id)
    while True:
        n = _colour_ops(s, salt, chip_colour, link_colour, seen, table_hash, table_id, op_colour)
        # Fewer than before can only be a collision, which the caller's check finds.
        if n <= n_op_colours:
            return op_colour, chip_colour, link_colour
        n_op_colours = n
        n = _colour_chips(s, salt, op_colour, table_hash, table_id, chip_colour)
        n += _colour_links(s, salt, op_colour, table_hash, table_id, link_colour)
        if n <= n_others:
            return op_colour, chip_colour, link_colour
        n_others = n


@kernel
def _same_row(indptr, indices, a, b, colour):
    """Whether rows ``a`` and ``b`` hold the same colours in the same order."""
    shift = indptr[b] - indptr[a]
    if indptr[b + 1] - indptr[a + 1] != shift:
        return False
    for p in range(indptr[a], indptr[a + 1]):
        if colour[indices[p]] != colour[indices[p + shift]]:
            return False
    return True


@kernel
def _same_multiset(indptr, indices, a, b, colour, count):
    """Whether rows ``a`` and ``b`` hold the same colours equally often.

    ``count`` is zero before, and after where they do: nothing is compared after a difference.
    """
    if _same_row(indptr, indices, a, b, colour):
        return True
    if indptr[a + 1] - indptr[a] != indptr[b + 1] - indptr[b]:
        return False
    for p in range(indptr[a], indptr[a + 1]):
        count[colour[indices[p]]] += 1
    for p in range(indptr[b], indptr[b + 1]):
        count[colour[indices[p]]] -= 1
        if count[colour[indices[p]]] < 0:
            return False
    return True


@kernel
def _same_set(indptr, indices, a, b, colour, count):
    """Whether rows ``a`` and ``b`` hold the same colours, however often; ``count`` as for `_same_multiset`."""
    if _same_row(indptr, indices, a, b, colour):
        return True
    for p in range(indptr[a], indptr[a + 1]):
        count[colour[indices[p]]] = 1
    for p in range(indptr[b], indptr[b + 1]):
        if count[colour[indices[p]]] == 0:
            return False
        count[colour[indices[p]]] = 2
    for p in range(indptr[a], indptr[a + 1]):
        if count[colour[indices[p]]] == 1:
            return False
    for p in range(indptr[a], indptr[a + 1]):
        count[colour[indices[p]]] = 0
    return True


@kernel(allocates=True, entry=True)
def first_members(colour):
    """Return the first member of every colour (int32, shape (n_colours,)); colours are dense by first appearance."""
    n = 0
    for c in colour:
        n = max(n, c + 1)
    first = np.full(n, -1, np.int32)
    for i in range(len(colour)):
        if first[colour[i]] < 0:
            first[colour[i]] = i
    return first


@kernel(allocates=True, entry=True)
def is_equitable(s, op_colour, chip_colour, link_colour):
    """Whether every member of every class has the neighbourhood of the class's first member."""
    count = np.zeros(len(op_colour) + len(chip_colour) + len(link_colour) + 1, np.int32)
    first_op, first_chip = first_members(op_colour), first_members(chip_colour)
    first_link = first_members(link_colour)
    for op in range(len(op_colour)):
        a = first_op[op_colour[op]]
        if a == op:
            continue
        if s.op_label[a] != s.op_label[op]:
            return False
        if s.op_kind[op] == COMPUTE and chip_colour[s.op_chip[a]] != chip_colour[s.op_chip[op]]:
            return False
        if not (
            _same_set(s.pred_indptr, s.pred_indices, a, op, op_colour, count)
            and _same_multiset(s.entry_indptr, s.entry_indices, a, op, chip_colour, count)
            and _same_multiset(s.route_indptr, s.route_indices, a, op, link_colour, count)
        ):
            return False
    for chip in range(len(chip_colour)):
        a = first_chip[chip_colour[chip]]
        if s.chip_label[a] != s.chip_label[chip] or not (
            _same_multiset(s.chip_indptr, s.chip_ops, a, chip, op_colour, count)
            and _same_multiset(s.exit_indptr, s.exit_ops, a, chip, op_colour, count)
        ):
            return False
    for link in range(len(link_colour)):
        a = first_link[link_colour[link]]
        if s.link_label[a] != s.link_label[link]:
            return False
        if not _same_multiset(s.link_indptr, s.link_ops, a, link, op_colour, count):
            return False
    return True


@kernel(allocates=True, entry=True)
def class_edges(s, op_colour, first_op):
    """Distinct (predecessor class, class) pairs of the first members, grouped by class.

    Returns
    -------
    pred, succ : ndarrays of int32
    """
    seen = np.full(len(first_op), -1, np.int32)
    n = 0
    for pass_ in range(2):
        if pass_ == 1:
            pred, succ = np.empty(n, np.int32), np.empty(n, np.int32)
            seen[:] = -1
        n = 0
        for c in range(len(first_op)):
            op = first_op[c]
            for p in range(s.pred_indptr[op], s.pred_indptr[op + 1]):
                before = op_colour[s.pred_indices[p]]
                if seen[before] != c:
                    seen[before] = c
                    if pass_ == 1:
                        pred[n], succ[n] = before, c
                    n += 1
    return pred, succ


@kernel(allocates=True, entry=True)
def class_routes(s, op_colour, first_link, n_classes):
    """Link classes crossed by each flow class, with the number of its flows on one such link.

    Returns
    -------
    indptr : ndarray of int64, shape (n_classes + 1,)
    links : ndarray of int32
    counts : ndarray of float64
    """
    count = np.zeros(n_classes, np.int64)
    indptr = np.zeros(n_classes + 1, np.int64)
    for link in first_link:
        for p in range(s.link_indptr[link], s.link_indptr[link + 1]):
            c = op_colour[s.link_ops[p]]
            count[c] += 1
            if count[c] == 1:
                indptr[c + 1] += 1
        for p in range(s.link_indptr[link], s.link_indptr[link + 1]):
            count[op_colour[s.link_ops[p]]] = 0
    for c in range(n_classes):
        indptr[c + 1] += indptr[c]
    fill = indptr[:-1].copy()
    links, counts = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], np.float64)
    for k in range(len(first_link)):
        link = first_link[k]
        for p in range(s.link_indptr[link], s.link_indptr[link + 1]):
            count[op_colour[s.link_ops[p]]] += 1
        for p in range(s.link_indptr[link], s.link_indptr[link + 1]):
            c = op_colour[s.link_ops[p]]
            if count[c] > 0:
                links[fill[c]], counts[fill[c]] = k, count[c]
                fill[c] += 1
                count[c] = 0
    return indptr, links, counts
