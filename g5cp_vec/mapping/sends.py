"""Who sends to whom: pairs of chips, and groups in which every member sends to every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.int32]


class Sends(NamedTuple):
    """Pairs of chips that flows connect, worked out once however many flows there are.

    ``home`` has the shape of the pairs; the rest is of the kept ones: homes, ends, routes and latency ids.
    """

    pairs: tuple[Ids, Ids]
    home: NDArray[np.int64]
    n_slots: int
    kept: NDArray[np.int64]
    src: Ids
    dst: Ids
    length: NDArray[np.int64]
    links: Ids
    latency: Ids


class Exchange(NamedTuple):
    """Where every chip stands in the groups of an exchange, whose slots begin with ``first_slot``."""

    first_slot: int
    chips: Ids
    digits: tuple[int, ...]
    group: Ids
    member: Ids


def flat(parts: Sequence[ArrayLike], dtype: type = np.int32) -> NDArray[Any]:
    """Return arrays one after another."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def each_step(of_step: NDArray[Any], n_steps: int) -> NDArray[Any]:
    """Repeat what is the same in each step, step by step."""
    return of_step if n_steps == 1 else of_step[None].repeat(n_steps, axis=0).ravel()


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


def senders_and_slots(exchange: Exchange, chips: NDArray[Any]) -> tuple[Ids, NDArray[np.int64]]:
    """Return who sends to each chip, the nearest behind it in the group first, and the slots of these sends.

    Both have shape (len(chips), size - 1).
    """
    at = exchange.member[chips][:, None]
    behind = (at - np.arange(1, exchange.chips.shape[1])) % exchange.chips.shape[1]
    return exchange.chips[exchange.group[chips][:, None], behind], _slots(exchange, behind, at)


def receivers_and_slots(exchange: Exchange, chips: NDArray[Any]) -> tuple[Ids, NDArray[np.int64]]:
    """Return to whom each chip sends, the nearest ahead of it first, and the slots of these sends."""
    at = exchange.member[chips][:, None]
    ahead = (at + np.arange(1, exchange.chips.shape[1])) % exchange.chips.shape[1]
    return exchange.chips[exchange.group[chips][:, None], ahead], _slots(exchange, at, ahead)


def _slots(exchange: Exchange, src: NDArray[Any], dst: NDArray[Any]) -> NDArray[np.int64]:
    """Slots of the sends between members of a group: by the distance in each digit of their places."""
    distance, stride = np.zeros(np.broadcast_shapes(src.shape, dst.shape), np.int64), 1
    for digit in reversed(exchange.digits):
        distance += (dst // stride - src // stride) % digit * stride
        stride *= digit
    return exchange.first_slot + distance - 1
