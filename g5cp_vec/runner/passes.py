"""Chunked prefill: a point becomes several passes, each over the cache that the passes before have filled.

So does a batch of which a step of the engine computes only some sequences at a time (`g5cp_vec.config.limits`).
A pass is simulated like a point of its own; the next one starts when it has ended on every rank. So the times, the
traffic and the work of a point are sums over its passes, its memory is that of the pass that needs most, and every
pass is audited. Not modelled: passes of several chunks in flight through pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.limits import at_once

Ints = NDArray[np.int64]


class Point(NamedTuple):
    """Load keys of some rows, arrays of shape (n_rows,)."""

    seq_len: Ints
    batch: Ints
    cached_tokens: Ints
    chunk_tokens: Ints


class Passes(NamedTuple):
    """Passes of some rows, row by row.

    Attributes
    ----------
    first : ndarray of int64, shape (n_rows,)
        First pass of each row.
    n_each : ndarray of int64, shape (n_rows,)
    seq_len, batch, cached_tokens : ndarrays of int64, shape (n_passes,)
        Context at the end of each pass, sequences that it computes, and tokens cached before it.
    held : ndarray of int64, shape (n_passes,)
        Sequences that the cache holds.
    """

    first: Ints
    n_each: Ints
    seq_len: Ints
    batch: Ints
    cached_tokens: Ints
    held: Ints

    @property
    def load(self) -> tuple[Ints, Ints, Ints]:
        """``seq_len``, ``batch``, ``cached_tokens``."""
        return self.seq_len, self.batch, self.cached_tokens

    @property
    def n_passes(self) -> int:
        """Passes of all rows."""
        return len(self.seq_len)

    def of_row(self, row: Any) -> range:
        """Return the passes of a row."""
        return range(int(self.first[row]), int(self.first[row] + self.n_each[row]))

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the sum over the passes of each row; ``values`` has one entry per pass along its first axis."""
        summed: NDArray[Any] = np.add.reduceat(values, self.first, axis=0)
        return summed

    def max(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the largest over the passes of each row."""
        largest: NDArray[Any] = np.maximum.reduceat(values, self.first, axis=0)
        return largest

    def largest(self, values: NDArray[Any]) -> Ints:
        """Return the first pass of each row whose value is the row's largest."""
        is_largest = values == np.repeat(self.max(values), self.n_each)
        place = np.where(is_largest, np.arange(len(values)), len(values))
        first: Ints = np.minimum.reduceat(place, self.first)
        return first


def count_passes(point: Point, is_prefill: Any, steps: Any = 0) -> Ints:
    """Return the passes of each row: one, but in a prefill that is chunked, or whose batch is more than a step's.

    ``is_prefill``, and the new tokens of a step (0: any), for all rows or for each.
    """
    together, of_sequence = _passes_of_prefill(point, steps)
    return np.where(is_prefill, -(-point.batch // together) * of_sequence, 1)


def _passes_of_prefill(point: Point, steps: Any) -> tuple[Ints, Ints]:
    """Return how many sequences go together, and how many passes they take."""
    new = point.seq_len - point.cached_tokens
    chunks = np.maximum(-(-new // np.maximum(point.chunk_tokens, 1)), 1)
    return at_once(steps, point.batch, new, point.chunk_tokens), np.where(point.chunk_tokens > 0, chunks, 1)


def split_passes(dep: Deployment, point: Point) -> Passes:
    """Return the passes of some rows of a deployment: one lot of sequences after another, each chunk by chunk."""
    is_prefill, steps = dep.phase == "prefill", dep.step_tokens or 0
    n_each = count_passes(point, is_prefill, steps)
    first = np.cumsum(n_each) - n_each
    seq_len, batch, cached, chunk = (np.repeat(values, n_each) for values in point)
    if not is_prefill:
        return Passes(first, n_each, seq_len, batch, cached, batch)
    together, of_sequence = (np.repeat(values, n_each) for values in _passes_of_prefill(point, steps))
    number = np.arange(len(seq_len)) - np.repeat(first, n_each)
    lot, place = number // of_sequence, number % of_sequence
    before = cached + place * chunk
    after = np.where(chunk > 0, np.minimum(before + chunk, seq_len), seq_len)
    return Passes(first, n_each, after, np.minimum(together, batch - lot * together), before, batch)


def distinct(columns: Sequence[Ints]) -> tuple[list[Ints], Ints]:
    """Return the distinct rows of some columns, column by column, and which of them each row is."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        if len(column) and np.any(column != column[0]):
            values, of_row = np.unique(column, return_inverse=True)
            # Numbered anew every time, so that codes stay small.
            _, code = np.unique(code * len(values) + of_row, return_inverse=True)
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return [column[first] for column in columns], which
