"""Collectives expanded into flows.

Every function takes groups of chips, shape (n_groups, size), and what each member's first send waits for, as a list
of arrays of op ids of that shape; it returns what each member must wait for afterwards, in the same form.

``ring``: size - 1 steps for a reduce-scatter or an all-gather; a member sends in order (a step after its last send
and after what it received in the step before), as one channel of a collective library does.
``direct``: every member sends to every other at once. Arithmetic of reductions is not priced.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.mapping.graph import BlockBuilder, Ids


def _edges(b: BlockBuilder, preds: list[Ids], succs: Ids) -> None:
    for pred in preds:
        b.edge(pred, succs)


def _ring(b: BlockBuilder, chips: Ids, after: list[Ids], message: int, reason: str, first_step: int) -> list[Ids]:
    """Size - 1 steps around the ring. The last send is returned too: the next collective sends after it."""
    size = chips.shape[1]
    following = np.roll(chips, -1, axis=1)
    for step in range(size - 1):
        sent = b.flow(chips, following, message, reason, first_step + step)
        _edges(b, after, sent)
        after = [np.roll(sent, 1, axis=1), sent]
    return after


def direct_exchange(
    b: BlockBuilder, chips: Ids, after: list[Ids], message: int, reason: str, step: int = 0
) -> list[Ids]:
    """Send one message from every member to every other member at once (the all-to-all of expert dispatch)."""
    size = chips.shape[1]
    member = np.arange(size)
    # peers[j, k] = the k-th chip after member j; ids get one more axis than the groups.
    peers = (member[:, None] + np.arange(1, size)[None, :]) % size
    src = np.broadcast_to(chips[:, :, None], (*chips.shape, size - 1))
    sent = b.flow(src, chips[:, peers], message, reason, step)
    for pred in after:
        b.edge(pred[:, :, None], sent)
    # The k-th flow into member m comes from member m - k - 1, as its k-th send.
    return [sent[:, (member - k - 1) % size, k] for k in range(size - 1)]


def reduce_scatter(
    b: BlockBuilder, chips: Ids, after: list[Ids], message: int, reason: str, algorithm: str, first_step: int = 0
) -> list[Ids]:
    """Reduce-scatter: each member ends with its chunk of ``message`` bytes, summed over the group."""
    if algorithm == "ring":
        return _ring(b, chips, after, message, reason, first_step)
    return direct_exchange(b, chips, after, message, reason, first_step)


def all_gather(
    b: BlockBuilder, chips: Ids, after: list[Ids], message: int, reason: str, algorithm: str, first_step: int = 0
) -> list[Ids]:
    """All-gather: each member contributes ``message`` bytes and ends with everyone's."""
    if algorithm == "ring":
        return _ring(b, chips, after, message, reason, first_step)[:1]
    # A member's own chunk is ready when ``after`` is, whatever the others send.
    return direct_exchange(b, chips, after, message, reason, first_step) + after


def all_reduce(b: BlockBuilder, chips: Ids, after: list[Ids], message: int, reason: str, algorithm: str) -> list[Ids]:
    """All-reduce of size * ``message`` bytes: a reduce-scatter, then an all-gather."""
    size = chips.shape[1]
    scattered = reduce_scatter(b, chips, after, message, reason, algorithm)
    gather_step = size - 1 if algorithm == "ring" else 1
    return all_gather(b, chips, scattered, message, reason, algorithm, gather_step)
