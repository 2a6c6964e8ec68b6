"""Rank coordinates: which chip holds (dp, pp, cp, tp), and the groups along each axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

AXES = ("dp", "pp", "cp", "tp")


def rank_chips(sizes: dict[str, int], rank_order: Sequence[str]) -> NDArray[np.int32]:
    """Return the chip of every rank.

    Parameters
    ----------
    sizes : dict
        Size of each of `AXES`.
    rank_order : sequence of str
        The axes, fastest first: chips are numbered along the first, then the second, and so on.

    Returns
    -------
    chips : ndarray of int32, shape (dp, pp, cp, tp)
    """
    slowest_first = list(reversed(rank_order))
    n = int(np.prod([sizes[axis] for axis in AXES]))
    numbered = np.arange(n, dtype=np.int32).reshape([sizes[axis] for axis in slowest_first])
    return np.ascontiguousarray(numbered.transpose([slowest_first.index(axis) for axis in AXES]))


def groups_along(ranks: NDArray[np.int32], axis: int) -> NDArray[np.int32]:
    """Return the groups along one axis: shape (n_groups, size of the axis)."""
    others = [i for i in range(ranks.ndim) if i != axis]
    return ranks.transpose(*others, axis).reshape(-1, ranks.shape[axis])


def from_groups(groups: NDArray[np.int32], shape: tuple[int, ...], axis: int) -> NDArray[np.int32]:
    """Undo `groups_along`: an array of ``shape`` from groups along ``axis``."""
    if axis == len(shape) - 1:
        return groups.reshape(shape)
    moved = [n for i, n in enumerate(shape) if i != axis] + [shape[axis]]
    return np.moveaxis(groups.reshape(moved), -1, axis)


def expert_groups(ranks: NDArray[np.int32], ep: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Split the (dp, tp) ranks at each cp coordinate into expert groups.

    In (dp, tp) order, consecutive ``moe_tp = dp * tp / ep`` ranks hold the experts of one EP rank; EP groups stride
    over them.

    Parameters
    ----------
    ranks : ndarray of int32, shape (dp, cp, tp)
        Chips, or ids of one op per rank.

    Returns
    -------
    ep_groups : ndarray of int32, shape (cp * moe_tp, ep)
    moe_tp_groups : ndarray of int32, shape (cp * ep, moe_tp)
    """
    dp, cp, tp = ranks.shape
    by_cp = ranks.transpose(1, 0, 2).reshape(cp, ep, dp * tp // ep)
    return by_cp.transpose(0, 2, 1).reshape(-1, ep), by_cp.reshape(-1, dp * tp // ep)


def expert_digits(dp: int, tp: int, ep: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the factors of an EP group's size and of a moe_tp group's by replicas and shards, replicas first."""
    moe_tp = dp * tp // ep
    over_replicas = (moe_tp // tp, tp) if moe_tp % tp == 0 else (moe_tp,)
    return ((dp, tp // moe_tp) if tp % moe_tp == 0 else (ep,)), over_replicas


def rank_digits(dp: int, tp: int, moe_tp: int) -> tuple[int, int]:
    """Return how many consecutive replicas, and how many consecutive shards, hold one EP rank's experts together.

    Divisors of dp and of tp; 1 where the ``moe_tp`` ranks are not so many whole replicas or shards.
    """
    replicas = moe_tp // tp if moe_tp % tp == 0 else 1
    return replicas if dp % replicas == 0 else 1, moe_tp if tp % moe_tp == 0 else 1
