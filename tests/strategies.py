"""Hypothesis strategies for `replay` workloads and for max-min problems."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

# Few distinct values, so that ends coincide often.
TIDY = {
    "secs": st.sampled_from([0, 0.5, 1, 1, 2, 3]),
    "bytes": st.sampled_from([0, 1, 2, 4, 6, 12]),
    "bw": st.sampled_from([1, 1, 2, 4]),
    "lat": st.sampled_from([0, 0, 0, 0.5, 1]),
}
# Numbers as a deployment has them.
PLAIN = {
    "secs": st.floats(1e-6, 1e-2) | st.just(0),
    "bytes": st.integers(1, 10**8) | st.just(0),
    "bw": st.floats(1e9, 1e11),
    "lat": st.floats(1e-7, 1e-5) | st.just(0),
}
# Values that meet although they are many powers of ten apart.
HUGE = {
    "secs": st.sampled_from([0, 1e-9, 1e-3, 1, 1e4]) | st.floats(1e-9, 1e4),
    "bytes": st.sampled_from([0, 1, 1e3, 1e15]) | st.floats(1, 1e15),
    "bw": st.sampled_from([1e3, 1e9, 1e12]) | st.floats(1e3, 1e12),
    "lat": st.sampled_from([0, 0, 1e-9, 1e-6, 10]),
}


@st.composite
def workloads(draw, regimes=(TIDY, PLAIN, HUGE), max_ops=16, distinct_prio=False):
    """A workload that is a DAG: dependencies follow a hidden order of the ops, not their indices."""
    values = draw(st.sampled_from(regimes))
    n_links = draw(st.integers(0, 9))
    n_chips = draw(st.sampled_from([2, 1, 3, 0]))
    links = [{"bw": draw(values["bw"]), "lat": draw(values["lat"])} for _ in range(n_links)]
    for link in links:
        if draw(st.booleans()):
            del link["lat"]  # absent means 0
    # A hub is crossed by about half of the flows.
    routes = st.just([])
    if n_links:
        routes = st.tuples(st.sampled_from([[], [0]]), st.lists(st.integers(0, n_links - 1), max_size=8)).map(
            lambda parts: list(dict.fromkeys(parts[0] + parts[1]))[:8]
        )
    n_ops = draw(st.integers(1, max_ops))
    prios = draw(st.permutations(range(n_ops))) if distinct_prio else []
    ops = []
    for op in range(n_ops):
        if n_chips and draw(st.booleans()):
            chip = draw(st.integers(0, n_chips - 1))
            prio = prios[op] if distinct_prio else draw(st.integers(-1, 2))
            ops.append({"kind": "compute", "chip": chip, "secs": draw(values["secs"]), "prio": prio})
        else:
            ops.append(
                {"kind": "flow", "route": draw(routes), "bytes": draw(values["bytes"]), "lat": draw(values["lat"])}
            )
    order = draw(st.permutations(range(n_ops)))
    deps = []
    if n_ops > 1:
        pairs = st.sampled_from(list(itertools.combinations(range(n_ops), 2)))
        deps += [[order[before], order[after]] for before, after in draw(st.lists(pairs, max_size=2 * n_ops))]
        if deps and draw(st.booleans()):
            deps.append(list(draw(st.sampled_from(deps))))  # a repeated one counts once
    return {"links": links, "chips": n_chips, "ops": ops, "deps": deps}


@st.composite
def queues(draw, regimes=(TIDY, PLAIN), max_ops=14):
    """A workload whose flows queue up on few routes; some routes share a link, and some begin or end at one instant."""
    values = draw(st.sampled_from(regimes))
    n_links = draw(st.integers(1, 4))
    routes = draw(st.lists(st.permutations(range(n_links)).map(tuple), min_size=1, max_size=3))
    routes = [route[: draw(st.integers(1, n_links))] for route in routes]
    ops = []
    for _ in range(draw(st.integers(2, max_ops))):
        if draw(st.sampled_from([False, False, False, True])):
            ops.append({"kind": "compute", "chip": draw(st.integers(0, 1)), "secs": draw(values["secs"]), "prio": 0})
        else:
            route = draw(st.sampled_from([routes[0], *routes]))
            # Whole multiples of a latency: many begin while others move, several of them at once.
            lat = draw(values["lat"]) * draw(st.integers(0, 3))
            ops.append({"kind": "flow", "route": list(route), "bytes": draw(values["bytes"]), "lat": lat})
    pairs = st.sampled_from(list(itertools.combinations(range(len(ops)), 2)))
    deps = [list(pair) for pair in draw(st.lists(pairs, max_size=len(ops), unique=True))]
    links = [{"bw": draw(values["bw"])} for _ in range(n_links)]
    return {"links": links, "chips": 2, "ops": ops, "deps": deps}


@st.composite
def sharing_problems(draw, max_flows=6, max_links=5):
    """``(routes, capacities)`` of flows that all start at once; every route crosses at least one link."""
    capacities = draw(st.lists(st.sampled_from([1, 2, 3]) | st.floats(0.5, 8), min_size=1, max_size=max_links))
    route = st.lists(st.integers(0, len(capacities) - 1), min_size=1, max_size=8, unique=True)
    return draw(st.lists(route, min_size=1, max_size=max_flows)), capacities
