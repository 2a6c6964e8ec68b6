"""Capacity violations against their slow twin, interval by interval, whatever is gathered and however it is cut."""

from __future__ import annotations

from fractions import Fraction

import naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import sharing_problems
from test_audit_sharing import violations

from g5cp_vec.audit import sharing

BYTES_RTOL, END_RTOL = 1e-9, 4e-12


def twin(routes, capacity, n_bytes, active_s, finish_s):
    """Count violations, and return what each flow moves at fair rates; times are well apart."""
    instants = sorted({*active_s, *finish_s})
    flows = range(len(routes))
    moved, shares = [Fraction(0) for _ in flows], []
    for begin, end in zip(instants, instants[1:], strict=False):
        here = [f for f in flows if active_s[f] <= begin and finish_s[f] >= end]
        rates = naive.solve_maxmin([routes[f] for f in here], capacity) if here else []
        shares.append((Fraction(begin), Fraction(end), dict(zip(here, rates, strict=True))))
        for f, rate in shares[-1][2].items():
            moved[f] += rate * (Fraction(end) - Fraction(begin))
    n = 0
    for f in flows:
        narrowest = min(capacity[link] for link in routes[f])
        n += abs(float(moved[f]) - n_bytes[f]) > BYTES_RTOL * n_bytes[f] + END_RTOL * finish_s[f] * narrowest
    for begin, end, rates in shares:
        for link, room in enumerate(capacity):
            crossing = [f for f in rates if link in routes[f]]
            asked = sum(rates[f] * Fraction(n_bytes[f]) / moved[f] for f in crossing) * (end - begin)
            n += float(asked) > room * (float(end - begin) * (1 + BYTES_RTOL) + END_RTOL * float(end))
    return n, [float(m) for m in moved]


@pytest.fixture(params=[1, 7, 2**20], ids=lambda n: f"{n}-together")
def together(request, monkeypatch):
    monkeypatch.setattr(sharing, "BUNDLES_TOGETHER", request.param)


@given(sharing_problems(max_flows=5, max_links=4), st.data())
@pytest.mark.usefixtures("together")
def test_counts_equal_their_twin(problem, data):
    routes, capacity = problem
    n = len(routes)
    once = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=n, max_size=n))
    # The same again in layers to come, as in a deployment, and some flows twice.
    n_layers, copies = data.draw(st.integers(1, 3)), data.draw(st.lists(st.integers(1, 2), min_size=n, max_size=n))
    routes, spans = (
        [part for _ in range(n_layers) for part, k in zip(parts, copies, strict=True) for _ in range(k)]
        for parts in (routes, once)
    )
    layer = np.repeat(np.arange(n_layers), sum(copies))
    active_s = [float(begin + 6 * i) for (begin, _), i in zip(spans, layer, strict=True)]
    finish_s = [float(begin + length + 6 * i) for (begin, length), i in zip(spans, layer, strict=True)]
    _, fair = twin(routes, capacity, [1.0] * len(routes), active_s, finish_s)
    assert violations(routes, capacity, fair, finish_s, active_s) == 0
    factor = data.draw(
        st.lists(st.sampled_from([1, 1, 1, 0.5, 0.999, 1.001, 2]), min_size=len(fair), max_size=len(fair))
    )
    n_bytes = [n * f for n, f in zip(fair, factor, strict=True)]
    expected, _ = twin(routes, capacity, n_bytes, active_s, finish_s)
    assert violations(routes, capacity, n_bytes, finish_s, active_s) == expected


def test_problems_that_share_nothing_are_solved_together():
    # A chain of links, each flow over two of them: the second fills only when the first has; and one flow alone.
    owner = np.array([0, 0, 1, 1, 2, 3])
    links = np.array([0, 1, 1, 2, 2, 3])
    rate = sharing.fair_rates(owner, links, np.array([1, 2, 1, 4]), np.array([1.0, 9.0, 20.0, 2.0]))
    # Link 0 gives 1, link 1 has 8 left for two, link 2 has 12 left for one; the last has 2 for four.
    np.testing.assert_array_equal(rate, [1.0, 4.0, 12.0, 0.5])


@pytest.mark.parametrize("n_links", [8, 2**20, 2**24])
def test_routes_are_numbered_whole(n_links):
    rng = np.random.default_rng(3)
    some = [tuple(rng.integers(0, n_links, rng.integers(1, 9)).tolist()) for _ in range(40)]
    some += [(*route[:-1], (route[-1] + 1) % n_links) for route in some] + [route[:-1] for route in some if route[1:]]
    routes = [some[i] for i in rng.integers(0, len(some), 500)]
    indptr = np.cumsum([0, *map(len, routes)])
    zeros = np.zeros(len(routes))
    flows = sharing.Flows(indptr, np.array([link for route in routes for link in route]), zeros, zeros, zeros)
    number, example = sharing._number_routes(flows, n_links)
    assert len(example) == len(set(routes))
    assert [routes[example[i]] for i in number] == routes
