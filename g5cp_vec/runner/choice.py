"""``collective = "best"``: every row takes, for each kind of group, the algorithm that makes its step faster.

All rows are simulated with each algorithm for all groups at once. From the faster of these on, one kind of group after
another is changed over, and what is faster is kept: so a row is simulated at most twice and once for each kind of
group, and is never slower than with one algorithm for all. Which groups have a choice follows from the messages sent.
Rows that are audited are simulated once more, as they were chosen, and audited then.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.collectives import COLLECTIVES, GROUPS, algorithm_of, written
from g5cp_vec.runner.plan import Batch, Slice
from g5cp_vec.runner.results import Columns

Pieces = list[tuple[int, Columns]]
# Kinds of groups that have a choice, of every row of every slice.
Groups = list[list[tuple[str, ...]]]


class Simulate(Protocol):
    """Simulates a batch with algorithms."""

    def __call__(self, batch: Batch, collective: str, /, *, audits: bool) -> tuple[Pieces, Groups]:
        """Return the columns of the batch's slices, with audits or without, and the kinds of groups."""


def run_best(batch: Batch, simulate: Simulate, audited: NDArray[np.bool_]) -> Pieces:
    """Return the columns of every slice of a batch, each row with its algorithms.

    Parameters
    ----------
    batch : Batch
    simulate : Simulate
    audited : ndarray of bool
        Rows of the expansion that are audited.
    """
    first, *others = COLLECTIVES
    pieces, of_rows = simulate(batch, first, audits=False)
    groups = tuple(group for group in GROUPS if any(group in row for of_slice in of_rows for row in of_slice))
    chosen = [_Chosen(columns, first, groups, own) for (_, columns), own in zip(pieces, of_rows, strict=True)]
    for other in others if groups else ():
        again, _ = simulate(batch, other, audits=False)
        for mine, (_, columns) in zip(chosen, again, strict=True):
            mine.meet(columns, np.arange(len(mine.words)), written(dict.fromkeys(groups, other)))
    for group in groups if len(groups) > 1 else ():
        _change_over(batch, chosen, group, simulate)
    _audit_chosen(batch, chosen, simulate, audited)
    return [(n, mine.result()) for (n, _), mine in zip(pieces, chosen, strict=True)]


def _change_over(batch: Batch, chosen: list[_Chosen], group: str, simulate: Simulate) -> None:
    """Simulate every row with the other algorithm for one kind of group, where that was not tried."""
    rivals = [mine.changed_over(group) for mine in chosen]
    for word in sorted(set().union(*rivals)):
        rows = [np.flatnonzero([rival == word for rival in of_slice]) for of_slice in rivals]
        rows = [_not_tried(mine, at, word) for mine, at in zip(chosen, rows, strict=True)]
        for i, columns in _simulate_some(batch, rows, word, simulate, audits=False):
            chosen[i].meet(columns, rows[i], word)


def _audit_chosen(batch: Batch, chosen: list[_Chosen], simulate: Simulate, audited: NDArray[np.bool_]) -> None:
    """Simulate the rows that are audited with what was chosen for them, and take these simulations over."""
    for word in sorted({word for mine in chosen for word in mine.words}):
        rows = [
            np.flatnonzero(audited[s.rows] & np.array([own == word for own in mine.words]))
            for s, mine in zip(batch.slices, chosen, strict=True)
        ]
        for i, columns in _simulate_some(batch, rows, word or COLLECTIVES[0], simulate, audits=True):
            chosen[i].take(columns, rows[i], np.arange(len(rows[i])))


def _simulate_some(
    batch: Batch, rows: list[NDArray[np.int64]], word: str, simulate: Simulate, *, audits: bool
) -> list[tuple[int, Columns]]:
    """Simulate some rows of every slice; return the slices that have any, and their columns."""
    some = [i for i, at in enumerate(rows) if len(at)]
    if not some:
        return []
    slices = [Slice(batch.slices[i].deployment, batch.slices[i].rows[rows[i]]) for i in some]
    pieces, _ = simulate(Batch(batch.kind, batch.key, slices), word, audits=audits)
    return [(i, columns) for i, (_, columns) in zip(some, pieces, strict=True)]


def _not_tried(mine: _Chosen, rows: NDArray[np.int64], word: str) -> NDArray[np.int64]:
    return rows[[word not in mine.tried[row] for row in rows.tolist()]] if len(rows) else rows


class _Chosen:
    """Columns of a slice, row by row those of the fastest algorithms so far, and what these are."""

    def __init__(
        self, columns: Columns, algorithm: str, groups: tuple[str, ...], of_rows: list[tuple[str, ...]]
    ) -> None:
        self.groups, self.of_rows = groups, of_rows
        # Copies: rows are written into them.
        self.columns: dict[str, Any] = {
            name: list(value) if isinstance(value, list) else np.array(value) for name, value in columns.items()
        }
        word = written(dict.fromkeys(groups, algorithm))
        self.words = [word] * len(columns["step_s"])
        self.tried = [{word} for _ in self.words]

    def changed_over(self, group: str) -> list[str]:
        """Return the algorithms of every row with another one for a kind of group."""
        of_word = {word: self._other(word, group) for word in set(self.words)}
        return [of_word[word] for word in self.words]

    def _other(self, word: str, group: str) -> str:
        first, second = COLLECTIVES
        algorithms = {each: algorithm_of(word, each) for each in self.groups}
        algorithms[group] = second if algorithms[group] == first else first
        return written(algorithms)

    def meet(self, rival: Columns, rows: NDArray[np.int64], word: str) -> None:
        """Take over the rows of another simulation that are faster; ``rows`` says which it simulated."""
        wins = np.flatnonzero(rival["step_s"] < self.columns["step_s"][rows])
        for row in rows.tolist():
            self.tried[row].add(word)
        self.take(rival, rows, wins)
        for i in wins.tolist():
            self.words[rows[i]] = word

    def take(self, rival: Columns, rows: NDArray[np.int64], some: NDArray[np.int64]) -> None:
        """Take over ``some`` of the rows of another simulation."""
        for name, mine in self.columns.items():
            if isinstance(mine, list):
                for i in some.tolist():
                    mine[rows[i]] = rival[name][i]
            else:
                mine[rows[some]] = np.asarray(rival[name])[some]

    def result(self) -> dict[str, Any]:
        """Return the columns, with the algorithms of every row's own groups; None where none has a choice."""
        rows = zip(self.words, self.of_rows, strict=True)
        words = [written({group: algorithm_of(word, group) for group in own}) for word, own in rows]
        return self.columns | {"chosen_collective": [word or None for word in words]}
