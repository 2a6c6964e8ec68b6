"""What every network answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.links import LinkNames

Chips = NDArray[np.int32]
Links = NDArray[np.int32]


class Routes(NamedTuple):
    """Routes of several pairs of chips in CSR form.

    Attributes
    ----------
    indptr : ndarray of int64, shape (n_pairs + 1,)
    links : ndarray of int32, shape (nnz,)
    latency : ndarray of int32, shape (n_pairs,)
        Latency id of each route.
    """

    indptr: NDArray[np.int64]
    links: NDArray[np.int32]
    latency: NDArray[np.int32]


class Network(ABC):
    """Links and routes of ``n_chips`` chips.

    Attributes
    ----------
    n_chips : int
    shape : hashable
        Equal exactly when links, routes and ids are.
    names : LinkNames
    link_capacity : ndarray of int32, shape (n_links,)
        Capacity id of each link.
    chip_rate : ndarray of int32, shape (n_chips,)
        Rate id of each chip, 0 for full speed.
    """

    shape: Hashable
    link_capacity: NDArray[np.int32]
    chip_rate: NDArray[np.int32]

    def __init__(self, n_chips: int, names: LinkNames) -> None:
        self.n_chips = n_chips
        self.names = names
        self.chip_rate = np.zeros(n_chips, np.int32)

    @property
    def n_links(self) -> int:
        """Links, used or not."""
        return self.names.n_links

    @abstractmethod
    def routes(self, src: Chips, dst: Chips) -> Routes:
        """Return the route of every pair (``src[i]``, ``dst[i]``); both int32, shape (n_pairs,)."""

    @abstractmethod
    def capacities(self) -> list[float]:
        """Bytes/s of each capacity id."""

    @abstractmethod
    def latencies(self) -> list[float]:
        """Seconds of each latency id."""

    def moved_links(self, chips: Chips) -> Links | None:
        """Return where every link goes when every chip moves, if routes go along; None if not, or if it is not known.

        Parameters
        ----------
        chips : ndarray of int32, shape (n_chips,)
            A permutation: where each chip goes.

        Returns
        -------
        ndarray of int32, shape (n_links,), or None
            A permutation that takes the route of (a, b) to that of (chips[a], chips[b]), for all a and b, between
            links of the same capacity and chips of the same speed; the routes have the same latency.
        """
        return None

    def nodes(self, chips: Chips) -> Chips:
        """Return the node that each chip sits in; all in one where the machine has none."""
        return np.zeros_like(chips)

    def switch_of(self, chips: Chips) -> Chips | None:  # noqa: ARG002 (kinds with switches say more)
        """Return the lowest switch over each chip, in the shape of the chips; None where chips meet otherwise."""
        return None

    def rates(self) -> list[float]:
        """Speed of each rate id, as a fraction of the full one."""
        return [1.0]

    def link_name(self, link: int) -> str:
        """Return the name shown for a link."""
        return self.names.name(link)


def padded_routes(columns: list[NDArray[np.int32]], latency: NDArray[np.int32]) -> Routes:
    """Routes from columns of links, -1 where a route has no link in that place."""
    table = np.array(columns, np.int32).T
    used = table >= 0
    indptr = np.zeros(len(table) + 1, np.int64)
    np.cumsum(used.sum(axis=1), out=indptr[1:])
    return Routes(indptr, table[used], latency.astype(np.int32))


def moved_units(before: Chips, after: Chips, n_units: int) -> Links | None:
    """Return where units of chips go when their chips move, None where chips of one unit part or those of two meet.

    Parameters
    ----------
    before, after : ndarrays of int, shape (n_chips,)
        The unit where every chip is, and the one where it goes.
    n_units : int
        With those that hold no chip: they stay.
    """
    to = np.arange(n_units, dtype=np.int32)
    to[before] = after
    return to if (to[before] == after).all() and np.bincount(to).max() == 1 else None


def places_within(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (row, place in the row) of every entry of rows of the given lengths, row by row."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
