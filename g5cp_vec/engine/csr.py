"""Build the CSR arrays of a graph: adjacency by counting sort, and each chip's order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine._jit import kernel


@kernel(allocates=True, entry=True)
def group_by(n_rows, rows, columns):
    """Group ``columns`` by ``rows``, keeping their order within a row.

    Parameters
    ----------
    n_rows : int
    rows, columns : ndarrays of int32, shape (nnz,)
        Entries (row, column).

    Returns
    -------
    indptr : ndarray of int64, shape (n_rows + 1,)
    indices : ndarray of int32, shape (nnz,)
    """
    indptr = np.zeros(n_rows + 1, np.int64)
    for row in rows:
        indptr[row + 1] += 1
    for row in range(n_rows):
        indptr[row + 1] += indptr[row]
    fill = indptr[:-1].copy()
    indices = np.empty(len(columns), np.int32)
    for i in range(len(columns)):
        indices[fill[rows[i]]] = columns[i]
        fill[rows[i]] += 1
    return indptr, indices


@kernel(allocates=True, entry=True)
def join_rows(indptr, indices, rows, columns):
    """Pair every ``columns[i]`` with all entries of row ``rows[i]``.

    Returns
    -------
    entries, columns : ndarrays of int32
    """
    n = 0
    for row in rows:
        n += indptr[row + 1] - indptr[row]
    entries, joined = np.empty(n, np.int32), np.empty(n, np.int32)
    n = 0
    for i in range(len(rows)):
        for p in range(indptr[rows[i]], indptr[rows[i] + 1]):
            entries[n], joined[n] = indices[p], columns[i]
            n += 1
    return entries, joined


@kernel(allocates=True, entry=True)
def drop_repeated(indptr, indices):
    """Drop repeated entries within each row (the first stays); return a new pair of arrays."""
    n_rows = len(indptr) - 1
    last_row = np.full(n_rows, -1, np.int64)
    new_indptr = np.zeros(n_rows + 1, np.int64)
    kept = 0
    new_indices = np.empty_like(indices)
    for row in range(n_rows):
        for p in range(indptr[row], indptr[row + 1]):
            column = indices[p]
            if last_row[column] != row:
                last_row[column] = row
                new_indices[kept] = column
                kept += 1
        new_indptr[row + 1] = kept
    return new_indptr, new_indices[:kept].copy()


@kernel(allocates=True, entry=True)
def count_predecessors(n_rows, indices):
    """Return how often each op is named as a successor (int32, shape (n_rows,))."""
    count = np.zeros(n_rows, np.int32)
    for column in indices:
        count[column] += 1
    return count


@kernel(entry=True)
def _is_ordered(indptr, ops, op_prio):
    for row in range(len(indptr) - 1):
        for p in range(indptr[row] + 1, indptr[row + 1]):
            if op_prio[ops[p]] < op_prio[ops[p - 1]]:
                return False
    return True


def order_chips(
    n_chips: int, op_chip: NDArray[np.int32], op_prio: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Order each chip's compute ops by (priority, op index).

    Parameters
    ----------
    n_chips : int
    op_chip : ndarray of int32, shape (n_ops,)
        -1 for a flow.
    op_prio : ndarray of int64, shape (n_ops,)

    Returns
    -------
    chip_indptr : ndarray of int64, shape (n_chips + 1,)
    chip_ops : ndarray of int32, shape (n_compute,)
    op_rank : ndarray of int32, shape (n_ops,)
        Place of each compute op on its chip; -1 for a flow.
    """
    computes = np.flatnonzero(op_chip >= 0).astype(np.int32)
    chip_indptr, chip_ops = group_by(n_chips, op_chip.take(computes), computes)
    if not _is_ordered(chip_indptr, chip_ops, op_prio):
        chip_ops = computes[np.lexsort((computes, op_prio[computes], op_chip[computes]))]
    op_rank = np.full(len(op_chip), -1, np.int32)
    op_rank[chip_ops] = np.arange(len(chip_ops)) - np.repeat(chip_indptr[:-1], np.diff(chip_indptr))
    return chip_indptr, chip_ops, op_rank
