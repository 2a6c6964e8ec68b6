"""Collectives expanded into flows.

Every function takes groups of chips, shape (n_groups, size), and what each member's first send waits for, as a list
of arrays of handles of that shape; it returns what each member must wait for afterwards, in the same form.

``ring``: size - 1 steps for a reduce-scatter or an all-gather; a member sends in order (a step after its last send
and after what it received in the step before), as one channel of a collective library does.
``direct``: every member sends to every other at once. Arithmetic of reductions is not priced.

An all-reduce over groups of k chips on each of several nodes may go two other ways, as libraries choose them.
``rails``: k rings at once, which enter and leave every node by another chip, so that all network interfaces work;
for large messages. ``hierarchical``: reduce-scatter inside the nodes, all-reduce across them between chips of the same
place, all-gather inside; fewer steps, for small messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from g5cp_vec.mapping.graph import BlockBuilder, Handles, Ids


def node_members(nodes: Ids) -> int | None:
    """Return how many members of each group share a node, None where that is no reason for a special algorithm.

    Parameters
    ----------
    nodes : ndarray of int32, shape (n_groups, size)
        Node of each member. Groups must span several nodes, each with the same number, two at least, of consecutive
        members.
    """
    size = nodes.shape[1]
    starts = np.flatnonzero(np.any(nodes[:, 1:] != nodes[:, :-1], axis=0)) + 1
    if len(starts) == 0 or starts[0] == 1 or size % starts[0]:
        return None
    members = int(starts[0])
    by_node = nodes.reshape(len(nodes), -1, members)
    together = bool((by_node == by_node[:, :, :1]).all())
    apart = bool((np.diff(np.sort(by_node[:, :, 0], axis=1), axis=1) > 0).all())
    return members if together and apart else None


def distinct(waits: Sequence[Ids]) -> list[Ids]:
    """Drop arrays named twice, so that no edge is repeated."""
    return list({np.asarray(ids, np.int64).tobytes(): ids for ids in waits}.values())


def _edges(b: BlockBuilder, preds: list[Handles], succs: Ids) -> None:
    for pred in preds:
        b.edge(pred, succs)


def _ring(
    b: BlockBuilder, chips: Ids, after: list[Handles], message: int, reason: str, first_step: int
) -> list[Handles]:
    """Size - 1 steps around the ring. The last send is returned too: the next collective sends after it."""
    size = chips.shape[1]
    member = np.arange(size)
    following = chips.take((member + 1) % size, axis=1)
    first = b.relay(chips, following, size - 1, message, reason, first_step, in_order=True)
    for pred in after:
        b.edge(pred, first)
    last = b.later(first, size - 2)
    return [last.take(member - 1, axis=1), last]


def direct_exchange(
    b: BlockBuilder,
    chips: Ids,
    after: list[Handles],
    message: int,
    reason: str,
    step: int = 0,
    call: str | None = None,
    digits: tuple[int, ...] | None = None,
) -> list[Handles]:
    """Send one message from every member to every other member at once (an all-to-all).

    ``digits`` are the factors of the group's size by which its places are known to be alike; see `BlockBuilder`.
    """
    return [b.exchange(chips, after, digits or chips.shape[1:], message, reason, step, call)]


def reduce_scatter(
    b: BlockBuilder,
    chips: Ids,
    after: list[Handles],
    message: int,
    reason: str,
    algorithm: str,
    first_step: int = 0,
    digits: tuple[int, ...] | None = None,
) -> list[Handles]:
    """Reduce-scatter: each member ends with its chunk of ``message`` bytes, summed over the group."""
    if algorithm == "ring":
        return _ring(b, chips, after, message, reason, first_step)
    return direct_exchange(b, chips, after, message, reason, first_step, digits=digits)


def all_gather(
    b: BlockBuilder,
    chips: Ids,
    after: list[Handles],
    message: int,
    reason: str,
    algorithm: str,
    first_step: int = 0,
    digits: tuple[int, ...] | None = None,
) -> list[Handles]:
    """All-gather: each member contributes ``message`` bytes and ends with everyone's."""
    if algorithm == "ring":
        return _ring(b, chips, after, message, reason, first_step)[:1]
    # A member's own chunk is ready when ``after`` is, whatever the others send.
    return direct_exchange(b, chips, after, message, reason, first_step, digits=digits) + after


def all_reduce(
    b: BlockBuilder, chips: Ids, after: list[Handles], message: int, reason: str, algorithm: str
) -> list[Handles]:
    """All-reduce of size * ``message`` bytes: a reduce-scatter, then an all-gather."""
    size = chips.shape[1]
    scattered = reduce_scatter(b, chips, after, message, reason, algorithm)
    gather_step = size - 1 if algorithm == "ring" else 1
    return all_gather(b, chips, scattered, message, reason, algorithm, gather_step)


def rail_all_reduce(
    b: BlockBuilder, chips: Ids, after: list[Handles], members: int, inside: int, across: int, reason: str
) -> list[Handles]:
    """All-reduce along one ring per chip of a node, all at once.

    In ring r a node's chips follow one another from the r-th on, and the last one sends to the next node's r-th. So in
    every step a chip sends to the next one in its node for all rings but one, ``inside`` bytes together, and for that
    one, ``across`` bytes, to the next node. The rings keep step: each has the same hops.

    Parameters
    ----------
    members : int
        Chips of a group in each node, as `node_members` says.
    inside, across : int
        Bytes ids of members - 1 rings' pieces and of one ring's piece.
    """
    by_node = (len(chips), -1, members)

    def next_in_node(ids: Ids, shift: int) -> Ids:
        return np.roll(ids.reshape(by_node), shift, axis=2).reshape(chips.shape)

    def next_node(ids: Ids, shift: int) -> Ids:
        return np.roll(next_in_node(ids, shift).reshape(by_node), shift, axis=1).reshape(chips.shape)

    neighbour, beyond = next_in_node(chips, -1), next_node(chips, -1)
    for step in range(2 * (chips.shape[1] - 1)):
        near, far = b.flow(chips, neighbour, inside, reason, step), b.flow(chips, beyond, across, reason, step)
        _edges(b, after, near)
        _edges(b, after, far)
        arrived = [next_in_node(near, 1), next_node(far, 1)]
        after = [*arrived, near, far]
    return arrived


def hierarchical_all_reduce(
    b: BlockBuilder, chips: Ids, after: list[Handles], members: int, inside: int, across: int, reason: str
) -> list[Handles]:
    """All-reduce in three stages: reduce-scatter in every node, all-reduce across nodes, all-gather in every node.

    Parameters
    ----------
    members : int
        Chips of a group in each node, as `node_members` says.
    inside, across : int
        Bytes ids of the part that a chip of a node owns after the first stage, and of a node's share of that part.
    """
    n_nodes = chips.shape[1] // members

    def of_node(ids: Ids) -> Ids:
        return ids.reshape(-1, members)

    def of_place(ids: Ids) -> Ids:
        return np.ascontiguousarray(ids.reshape(-1, n_nodes, members).swapaxes(1, 2)).reshape(-1, n_nodes)

    def back(ids: Ids) -> Ids:
        return np.ascontiguousarray(ids.reshape(-1, members, n_nodes).swapaxes(1, 2)).reshape(-1, members)

    scattered = reduce_scatter(b, of_node(chips), [of_node(ids) for ids in after], inside, reason, "ring")
    places, step = of_place(chips), members - 1
    for _ in range(2):
        scattered = _ring(b, places, [of_place(ids) for ids in scattered], across, reason, step)
        scattered, step = [back(ids) for ids in scattered], step + n_nodes - 1
    gathered = all_gather(b, of_node(chips), scattered, inside, reason, "ring", step)
    return [ids.reshape(chips.shape) for ids in gathered]
