"""Machines for the workloads: chips, links, and the links between any two chips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Net(NamedTuple):
    """Chips and links of a machine.

    Attributes
    ----------
    n_chips : int
    capacity : ndarray of float64, shape (n_links,)
        Bytes/s, before they are drawn around.
    route : callable
        From arrays of sources and destinations to a table of links, one row a pair, -1 where a row has no more.
    """

    n_chips: int
    capacity: Array
    route: Callable[[Array, Array], Array]


def star(n_chips: int, bandwidth: float = 6e10) -> Net:
    """One switch: an up and a down link per chip."""
    return Net(n_chips, np.full(2 * n_chips, bandwidth), lambda src, dst: np.stack([src, n_chips + dst], axis=1))


def torus(rows: int, columns: int, bandwidth: float = 5e10) -> Net:
    """Two dimensions, four links out of every chip, the columns' way first, the shorter way round."""
    n_chips = rows * columns

    def steps(here: Array, there: Array, size: int) -> tuple[Array, Array]:
        """Length of the way round, and which way (0 up, 1 down)."""
        up = (there - here) % size
        return np.minimum(up, size - up), (up > size - up).astype(np.int64)

    def route(src: Array, dst: Array) -> Array:
        row, column = src // columns, src % columns
        far_x, down_x = steps(column, dst % columns, columns)
        far_y, down_y = steps(row, dst // columns, rows)
        table = np.full((len(src), columns // 2 + rows // 2), -1, np.int64)
        for hop in range(columns // 2):
            going = hop < far_x
            at = row * columns + (column + np.where(down_x == 1, -hop, hop)) % columns
            table[going, hop] = (4 * at + down_x)[going]
        for hop in range(rows // 2):
            going = hop < far_y
            at = (row + np.where(down_y == 1, -hop, hop)) % rows * columns + dst % columns
            table[going, columns // 2 + hop] = (4 * at + 2 + down_y)[going]
        return table

    return Net(n_chips, np.full(4 * n_chips, bandwidth), route)


def fat_tree(n_leaves: int, per_leaf: int = 4, n_spines: int = 2, bandwidth: float = 1e11) -> Net:
    """Chips under leaf switches, leaves under spines; half of what the chips of a leaf can send leaves it."""
    n_chips = n_leaves * per_leaf
    n_trunks = n_leaves * n_spines
    capacity = np.repeat([bandwidth, bandwidth * per_leaf / (2 * n_spines)], [2 * n_chips, 2 * n_trunks])

    def route(src: Array, dst: Array) -> Array:
        leaf, other, spine = src // per_leaf, dst // per_leaf, (src + dst) % n_spines
        up = np.where(leaf == other, -1, 2 * n_chips + leaf * n_spines + spine)
        down = np.where(leaf == other, -1, 2 * n_chips + n_trunks + other * n_spines + spine)
        return np.stack([src, up, down, n_chips + dst], axis=1)

    return Net(n_chips, capacity, route)
