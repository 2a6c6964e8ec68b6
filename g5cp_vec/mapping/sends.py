"""Who sends to whom: pairs of chips, and groups in which every member sends to every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.int32]


class Sends(NamedTuple):
    """Chips that compute, or pairs that flows connect, worked out once however many ops there are.

    ``home`` has the shape of the chips; the rest is of the kept ones: homes, ends, routes and latency ids.
    """

    home: NDArray[np.int64]
    n_slots: int
    kept: NDArray[np.int64]
    src: Ids
    dst: Ids
    length: NDArray[np.int64]
    links: Ids
    latency: Ids


class Exchange:
    """Groups in which every member sends to every other.

    Parameters
    ----------
    chips : ndarray of int32, shape (n_groups, size)
    digits : tuple of int
        Factors of ``size``: slots are numbered by the distance in each digit of the members' places.
    n_chips : int
        Of the network.
    """

    def __init__(self, chips: Ids, digits: tuple[int, ...], n_chips: int) -> None:
        self.chips, self._digits, self._n = chips, digits, n_chips
        place, home = np.arange(chips.size, dtype=np.int32), chips.ravel()
        self._group, self._member = np.zeros(n_chips, np.int32), np.zeros(n_chips, np.int32)
        self._group[home], self._member[home] = np.divmod(place, np.int32(chips.shape[1]))
        self._received: dict[bytes, NDArray[np.int64]] = {}

    def sent(self, chips: NDArray[Any]) -> tuple[Ids, NDArray[np.int64]]:
        """Return to whom each chip sends, the nearest ahead of it first, and the handles of these sends.

        Both have shape (len(chips), size - 1); handles count from the exchange's first slot.
        """
        size = self.chips.shape[1]
        at = self._member.take(chips)[:, None]
        ahead = (at + np.arange(1, size)) % size
        return self.chips[self._group[chips][:, None], ahead], self._handles(chips[:, None], at, ahead)

    def received(self, chips: NDArray[Any]) -> NDArray[np.int64]:
        """Return the handles of what each chip receives, from the nearest behind it first; shaped as what it sends."""
        key = chips.tobytes()
        if key not in self._received:
            size = self.chips.shape[1]
            at = self._member.take(chips)[:, None]
            behind = (at - np.arange(1, size)) % size
            senders = self.chips[self._group[chips][:, None], behind]
            self._received[key] = self._handles(senders, behind, at)
        return self._received[key]

    def _handles(self, senders: NDArray[Any], src: NDArray[Any], dst: NDArray[Any]) -> NDArray[np.int64]:
        """Return handles of sends between members of a group: slots by the distance in each digit of their places."""
        slot, stride = np.full(np.broadcast_shapes(src.shape, dst.shape), -1, np.int64), 1
        for digit in reversed(self._digits):
            slot += (dst // stride - src // stride) % digit * stride
            stride *= digit
        handles: NDArray[np.int64] = slot * self._n + senders
        return handles


def flat(parts: Sequence[ArrayLike], dtype: type = np.int32) -> NDArray[Any]:
    """Return arrays one after another."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def homes_of(src: Ids, dst: Ids, n_chips: int) -> tuple[NDArray[np.int64], int]:
    """Return slot * n_chips + home of every send, counted from the first slot, and the number of slots."""
    for ends in (src, dst):
        if np.bincount(ends.ravel(), minlength=1).max(initial=0) <= 1:
            return ends.astype(np.int64), 1
    # A chip's second send goes to the second slot, and so on.
    flat = src.ravel()
    order = np.argsort(flat, kind="stable")
    first = np.searchsorted(flat[order], flat[order], side="left")
    slot = np.empty(len(flat), np.int64)
    slot[order] = np.arange(len(flat)) - first
    return (slot * n_chips + flat).reshape(src.shape), int(slot.max()) + 1
