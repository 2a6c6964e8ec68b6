"""The order in which flows are taken at an instant."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.sorting import sort


@kernel(entry=True)
def _sort(ops, n):
    sort(ops, n)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=200), st.integers(0, 3))
def test_the_first_ones_are_sorted_and_no_others(values, n_left):
    ops = np.array(values, np.uint32)
    n = max(len(ops) - n_left, 0)
    expected = np.concatenate([np.sort(ops[:n]), ops[n:]])
    _sort(ops, n)
    np.testing.assert_array_equal(ops, expected)


@pytest.mark.parametrize("n", [2, 3, 1000, 1_000_000])
def test_orders_that_cost_an_insertion_sort_a_square_of_moves(n):
    """A square of a million moves would not end while anybody waits."""
    rng = np.random.default_rng(n)
    rising = np.arange(n, dtype=np.uint32)
    for order in (rising[::-1].copy(), rng.permutation(rising), np.concatenate([rising[n // 2 :], rising[: n // 2]])):
        _sort(order, n)
        np.testing.assert_array_equal(order, rising)
