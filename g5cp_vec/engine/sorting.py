"""Sorting of what is nearly sorted."""

from __future__ import annotations

from g5cp_vec.engine._jit import kernel

# Places per element that an insertion sort may move elements by.
MOST_MOVES = 8


@kernel(inlines=False)
def sort(values, n):
    """Sort the first ``n`` values in place.

    Mostly a value is at its place or very near, so inserting one after another is all; if it takes too many moves,
    values are moved over wide gaps first (Shell), which bounds what any order costs.
    """
    gap, most_moves = 1, MOST_MOVES * n
    while gap > 0:
        n_moves = 0
        for i in range(gap, n):
            value = values[i]
            if values[i - gap] <= value:
                continue
            j = i
            while j >= gap and values[j - gap] > value:
                values[j] = values[j - gap]
                j -= gap
            values[j] = value
            n_moves += i - j
            if n_moves > most_moves:
                break
        if n_moves > most_moves:
            gap, most_moves = n // 2, 2**62
        else:
            gap = 1 if gap == 2 else gap * 5 // 11
