"""Whether permutations of chips leave a structure as it is: machine, ops and dependencies.

Candidates rotate the ranks along dp, cp or tp, or along one digit of dp or tp where experts cut these axes. The network
says where links go when chips move; then the layers are described once more, to a builder that keeps no op and drops
every candidate that does not take each group of ops, sends and dependencies to itself. What is left are automorphisms
of the graph, so their orbits are an equitable partition of it, which `reduce` refines no further than it can merge.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    digit, shift = (np.array([getattr(r, name) for r in rotations]) for name in ("digit", "shift"))
    powers = (digit[:, None] == digit) & (shift[:, None] < shift) & (shift % shift[:, None] == 0)
    probe = Probe(network, np.stack([r.chips for r in rotations]), powers)
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
        size, before = view.shape[axis], view.ravel()
        for shift in range(1, size):
            if size % shift == 0:
                chips = np.empty(ranks.size, np.int32)
                chips[before] = view.take(np.arange(shift, size + shift) % size, axis=axis).ravel()
                yield Rotation(digit, shift, size // shift, chips)


class Probe(BlockBuilder):
    """A builder that keeps nothing and notes which permutations of chips take what it is told to itself.

    Parameters
    ----------
    network : Network
    moves : ndarray of int32, shape (n_moves, n_chips)
    powers : ndarray of bool, shape (n_moves, n_moves), optional
        Whether the second move is known to be the first one several times over: it holds where that does.

    Attributes
    ----------
    holds : ndarray of bool, shape (n_moves,)
    """

    def __init__(self, network: Network, moves: Ids, powers: NDArray[np.bool_] | None = None) -> None:
        super().__init__(network)
        self._moves = moves
        self._powers = np.zeros((len(moves), len(moves)), np.bool_) if powers is None else powers
        self.holds = np.ones(len(moves), np.bool_)
        self._choose()
        # Layers are alike: what was required once is not again.
        self._seen: set[Hashable] = set()
        self._homes: dict[Hashable, tuple[Handles, int]] = {}

    def compute(self, chips: Ids, cost: int, reason: str, step: int = 0, n_steps: int = 1) -> Handles:
        """Require that computing chips move to computing chips (their speeds are the network's affair)."""
        self._require(chips, chips)
        return self._open(n_steps) + chips

    def flow(self, src: Ids, dst: Ids, cost: int, reason: str, step: int = 0, call: str | None = None) -> Handles:
        """Require that both ends of a send move together."""
        key = (src.tobytes(), dst.tobytes(), src.shape)
        if key not in self._homes:
            home, _ = self._homes[key] = homes_of(src, dst, self._n)
            self._require(home, src)
            self._require(home, dst)
        home, n_slots = self._homes[key]
        return self._open(n_slots) + home

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
        key = (chips.tobytes(), digits)
        if key not in self._seen:
            self._seen.add(key)
            place, stride = np.arange(chips.shape[1]), 1
            for digit in reversed(digits):
                turn = (place // stride + 1) % digit - place // stride % digit
                self._require(chips, chips.take(place + turn * stride, axis=1))
                stride *= digit
        sent = self._open(1) + chips
        for pred in after:
            self.edge(pred, sent)
        return self._open(1) + chips

    def edge(self, preds: Handles, succs: Handles, n_steps: int = 1) -> None:
        """Require that dependencies move to dependencies between the same slots; of every step the same."""
        if n_steps:
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
        if these.size == 0 or len(self._tested) == 0:
            return
        # Which slot it is does not matter where there is one.
        these, those = (side.ravel() - side.item(0) // self._n * self._n for side in (these, those))
        key = (these.tobytes(), those.tobytes())
        if key in self._seen:
            return
        self._seen.add(key)
        stays = _stays(these, those, self._n)
        while len(self._tested):
            holds = stays(self._moves[self._tested])
            if holds.all():
                return
            self.holds[self._tested[~holds]] = False
            self._choose()

    def _choose(self) -> None:
        """Choose the permutations to test: all that hold so far but powers of such."""
        self._tested = np.flatnonzero(self.holds & ~self._powers[self.holds].any(axis=0))


def _stays(these: Handles, those: Handles, n: int) -> Callable[[Ids], NDArray[np.bool_]]:
    """Return what says of moves of ``n`` chips whether they take pairs of handles to themselves, all in all."""
    these, those = (side.astype(np.int64) - side.min() // n * n for side in (these, those))
    span = int(max(these.max(), those.max())) + n

    def moved(side: Handles) -> Callable[[Ids], Handles]:
        # Slots stay, chips at home in them move.
        home = side % n
        slot = side - home
        return lambda moves: slot + moves.take(home, axis=1)

    sides = ((these, moved(these)), (those, moved(those)))
    for (a, moved_a), (b, moved_b) in (sides, sides[::-1]):
        if np.bincount(a).max() == 1:
            partner = np.full(span, -1, np.int64)
            partner[a] = b
            return lambda moves: (partner.take(moved_a(moves)) == moved_b(moves)).all(axis=1)
    pairs, (moved_these, moved_those) = np.sort(these * span + those), (move for _, move in sides)
    return lambda moves: (np.sort(moved_these(moves) * span + moved_those(moves), axis=1) == pairs).all(axis=1)
