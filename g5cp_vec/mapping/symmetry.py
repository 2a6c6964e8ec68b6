"""Groups of permutations of chips under which a machine and what runs on it stay the same.

The members of an orbit do the same at the same time, so one of them can stand for all; what is here only says which
chips and links those are. `g5cp_vec.mapping.probe` proves that a structure has a symmetry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.mapping.network import Network

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Symmetry:
    """The orbits of a group that moves every chip (each of its elements but the identity).

    Attributes
    ----------
    order : int
        Elements of the group, so chips of every orbit; 1 for no symmetry.
    chips, links : ndarrays of int32
        Lowest member of every orbit, ascending.
    chip_orbit, link_orbit : ndarrays of int32, shapes (n_chips,) and (n_links,)
        Orbit of each, as a position in ``chips`` and ``links``.
    n_fixing : ndarray of int64, shape (n_link_orbits,)
        Elements of the group that leave one link of the orbit where it is.
    """

    order: int
    chips: Ids
    links: Ids
    chip_orbit: Ids
    link_orbit: Ids
    n_fixing: NDArray[np.int64]


def no_symmetry(network: Network) -> Symmetry:
    """Return the group of the identity alone: everything stands for itself."""
    chips, links = np.arange(network.n_chips, dtype=np.int32), np.arange(network.n_links, dtype=np.int32)
    return Symmetry(1, chips, links, chips, links, np.ones(len(links), np.int64))


def generated_symmetry(chip_moves: Sequence[Ids], link_moves: Sequence[Ids], orders: Sequence[int]) -> Symmetry:
    """Return the orbits of the group that permutations generate which commute and are independent of each other.

    Parameters
    ----------
    chip_moves, link_moves : sequences of ndarrays of int32, shapes (n_chips,) and (n_links,)
        Where each permutation takes every chip and every link.
    orders : sequence of int
        How often each permutation makes the identity.
    """
    chips, chip_orbit, chip_sizes = _orbits(chip_moves, orders)
    links, link_orbit, link_sizes = _orbits(link_moves, orders)
    order = math.prod(orders)
    assert (chip_sizes == order).all()
    return Symmetry(order, chips, links, chip_orbit, link_orbit, order // link_sizes)


def _orbits(moves: Sequence[Ids], orders: Sequence[int]) -> tuple[Ids, Ids, NDArray[np.int64]]:
    """Return lowest members, orbit of every element, and sizes."""
    members = orbit = np.arange(len(moves[0]), dtype=np.int32)
    for move, order in zip(moves, orders, strict=True):
        # It moves the orbits of those before as wholes. After i rounds the lowest of 2^i images is known.
        turned, lowest = orbit.take(move.take(members)), np.arange(len(members), dtype=np.int32)
        for _ in range((order - 1).bit_length()):
            lowest = np.minimum(lowest, lowest.take(turned))
            turned = turned.take(turned)
        is_lowest = lowest == np.arange(len(lowest))
        number = np.cumsum(is_lowest, dtype=np.int32) - np.int32(1)
        members, orbit = members[is_lowest], number.take(lowest).take(orbit)
    return members, orbit, np.bincount(orbit)
