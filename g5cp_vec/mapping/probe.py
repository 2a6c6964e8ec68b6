"""Whether permutations of chips leave a structure as it is: machine, ops and dependencies.

Candidates rotate the ranks along dp, cp or tp, or along one digit of dp or tp where experts cut these axes. The network
says where links go when chips move; then the layers are described once more, to a builder that keeps no op and drops
every candidate that does not take each group of ops, sends and dependencies to itself. What is left are automorphisms
of the graph, so their orbits are an equitable partition of it, which `reduce` refines no further than it can merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from g5cp_vec.mapping.graph import BlockBuilder, Handles
from g5cp_vec.mapping.network import Network
from g5cp_vec.mapping.sends import homes_of
from g5cp_vec.mapping.symmetry import Ids, Symmetry, generated_symmetry, no_symmetry


class Rotation(NamedTuple):
    """A rotation of the ranks: digit ``digit`` of their places turns by ``shift``, ``order`` times to come around.

    ``chips`` says where each chip goes.
    """

    digit: int
    shift: int
    order: int
    chips: Ids


# Digits of the ranks: all of dp, cp and tp, and the lower digits of dp and tp.
DP, CP, TP, LOW_DP, LOW_TP = range(5)


def find_symmetry(
    network: Network, ranks: Ids, dp_digit: int, tp_digit: int, describe: Callable[[BlockBuilder], Any]
) -> Symmetry:
    """Return the largest symmetry of a structure that rotations of its ranks make.

    Parameters
    ----------
    network : Network
    ranks : ndarray of int32, shape (dp, pp, cp, tp)
        The chip of every rank.
    dp_digit, tp_digit : int
        Divisors of dp and tp: how many consecutive replicas or shards experts belong to.
    describe : callable
        Adds all blocks of the structure to a builder, one after another.
    """
    rotations = list(_rotations(ranks, dp_digit, tp_digit))
    if not rotations:
        return no_symmetry(network)
    probe = Probe(network, np.stack([r.chips for r in rotations]))
    describe(probe)
    chosen: dict[int, tuple[Rotation, Ids]] = {}
    for rotation, holds in zip(rotations, probe.holds, strict=True):
        # They come by digit, the finest first.
        if holds and rotation.digit not in chosen:
            links = network.moved_links(rotation.chips)
            if links is not None:
                chosen[rotation.digit] = (rotation, links)
    # A lower digit turns on its own only where the whole axis steps over it.
    for low, axis, size in ((LOW_DP, DP, dp_digit), (LOW_TP, TP, tp_digit)):
        if low in chosen and axis in chosen and chosen[axis][0].shift % size != 0:
            del chosen[low]
    if not chosen:
        return no_symmetry(network)
    found, links_moves = zip(*chosen.values(), strict=True)
    return generated_symmetry([r.chips for r in found], links_moves, [r.order for r in found])


def _rotations(ranks: Ids, dp_digit: int, tp_digit: int) -> Iterable[Rotation]:
    dp, pp, cp, tp = ranks.shape
    by_digit = ranks.reshape(dp // dp_digit, dp_digit, pp, cp, tp // tp_digit, tp_digit)
    views: dict[int, tuple[Ids, int]] = {DP: (ranks, 0), CP: (ranks, 2), TP: (ranks, 3)}
    if 1 < dp_digit < dp:
        views[LOW_DP] = (by_digit, 1)
    if 1 < tp_digit < tp:
        views[LOW_TP] = (by_digit, 5)
    for digit, (view, axis) in views.items():
        size = view.shape[axis]
        for shift in range(1, size):
            if size % shift == 0:
                chips = np.empty(ranks.size, np.int32)
                chips[view.ravel()] = np.roll(view, -shift, axis=axis).ravel()
                yield Rotation(digit, shift, size // shift, chips)


class Probe(BlockBuilder):
    """A builder that keeps nothing and notes which permutations of chips take what it is told to itself.

    Parameters
    ----------
    network : Network
    moves : ndarray of int32, shape (n_moves, n_chips)

    Attributes
    ----------
    holds : ndarray of bool, shape (n_moves,)
    """

    def __init__(self, network: Network, moves: Ids) -> None:
        super().__init__(network)
        self._moves = moves
        self.holds = np.ones(len(moves), np.bool_)
        self._seen: set[tuple[bytes, bytes]] = set()
        self._chips: dict[int, Ids] = {}
        self._homes: dict[tuple[int, int], tuple[Ids, Ids, Handles, int]] = {}

    def compute(self, chips: Ids, cost: int, reason: str, step: int = 0, n_steps: int = 1) -> Handles:
        """Require that computing chips move to computing chips (their speeds are the network's affair)."""
        if id(chips) not in self._chips:
            self._chips[id(chips)] = chips
            self._require(chips, chips)
        return self._open(n_steps) + chips

    def flow(self, src: Ids, dst: Ids, cost: int, reason: str, step: int = 0, call: str | None = None) -> Handles:
        """Require that both ends of a send move together."""
        known = self._homes.get((id(src), id(dst)))
        if known is None:
            known = self._homes[id(src), id(dst)] = (src, dst, *homes_of(src, dst, self._n))
            self._require(known[2], src)
            self._require(known[2], dst)
        return self._open(known[3]) + known[2]

    def relay(
        self,
        src: Ids,
        dst: Ids,
        n_steps: int,
        cost: int,
        reason: str,
        step: int = 0,
        call: str | None = None,
        *,
        in_order: bool,
    ) -> Handles:
        """Require the same as of a send: who sends to whom decides who waits for whom."""
        first = self.flow(src, dst, cost, reason)
        self._open(n_steps - 1)
        return first

    def exchange(
        self,
        chips: Ids,
        after: list[Handles],
        digits: tuple[int, ...],
        cost: int,
        reason: str,
        step: int = 0,
        call: str | None = None,
    ) -> Handles:
        """Require that neighbours in each digit move together, as then members at any distance do."""
        place, stride = np.arange(chips.shape[1]), 1
        for digit in reversed(digits):
            turn = (place // stride + 1) % digit - place // stride % digit
            self._require(chips, chips[:, place + turn * stride])
            stride *= digit
        sent = self._open(1) + chips
        for pred in after:
            self.edge(pred, sent)
        return self._open(1) + chips

    def edge(self, preds: Handles, succs: Handles) -> None:
        """Require that dependencies move to dependencies between the same slots."""
        self._require(*np.broadcast_arrays(preds, succs))

    def entry(self, ops: Handles, chips: Ids) -> None:
        """Require that what waits at a chip moves with it."""
        self._require(ops, chips)

    def exit(self, ops: Handles, chips: Ids) -> None:
        """Require that what delivers to a chip moves with it."""
        self._require(ops, chips)

    def _open(self, n_slots: int) -> np.int64:
        self.n_slots += n_slots
        return np.int64((self.n_slots - n_slots) * self._n)

    def _require(self, these: Handles, those: Handles) -> None:
        """Drop the permutations that do not take the pairs (``these[i]``, ``those[i]``) to themselves, all in all."""
        if these.size == 0 or not self.holds.any():
            return
        # Which slot it is does not matter where there is one.
        these, those = (side.ravel() - side.flat[0] // self._n * self._n for side in (these, those))
        key = (these.tobytes(), those.tobytes())
        if key in self._seen:
            return
        self._seen.add(key)
        (slot, home), (other_slot, other) = np.divmod(these, self._n), np.divmod(those, self._n)
        alive = np.flatnonzero(self.holds)
        moves = self._moves[alive]
        if not slot.any() and not other_slot.any():
            for a, b in ((home, other), (other, home)):
                if np.bincount(a).max() == 1:
                    partner = np.full(self._n, -1, np.int64)
                    partner[a] = b
                    self.holds[alive] = (partner[moves[:, a]] == moves[:, b]).all(axis=1)
                    return
        base = ((slot - slot.min()) * (np.ptp(other_slot) + 1) + other_slot - other_slot.min()) * self._n
        pairs = np.sort((base + home) * self._n + other)
        moved = np.sort((base + moves[:, home]) * self._n + moves[:, other], axis=1)
        self.holds[alive] = (moved == pairs).all(axis=1)
