"""Symmetry classes against their definition, on small random systems with and without symmetry."""

from __future__ import annotations

from collections import defaultdict

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g5cp_vec.engine.arrays import COMPUTE, FLOW
from g5cp_vec.engine.quotient import Parts, class_edges, class_routes, first_members, is_equitable, refine


def csr(rows):
    """Rows of numbers as (indptr, indices)."""
    indptr = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return indptr, np.array([i for row in rows for i in row], np.int32)


def as_parts(system):
    """A plain system (see `naive.reductions`) as the arrays that the engine refines."""
    ops, chips, links = system["ops"], system["chips"], system["links"]
    runs_on, crossed_by = defaultdict(list), defaultdict(list)
    for i, op in enumerate(ops):
        if op["kind"] == "compute":
            runs_on[op["chip"]].append(i)
        for link in op["route"]:
            crossed_by[link].append(i)
    labels = naive.numbered([(op["kind"], op["label"]) for op in ops])
    return Parts(
        np.array(labels, np.int64),
        np.array([COMPUTE if op["kind"] == "compute" else FLOW for op in ops], np.int8),
        np.array([op["chip"] for op in ops], np.int32),
        *csr([op["preds"] for op in ops]),
        *csr([op["entries"] for op in ops]),
        *csr([op["route"] for op in ops]),
        *csr([runs_on[chip] for chip in range(len(chips))]),
        *csr([chip["exits"] for chip in chips]),
        *csr([crossed_by[link] for link in range(len(links))]),
        np.array(naive.numbered([link["label"] for link in links]), np.int32),
        np.array(naive.numbered([chip["label"] for chip in chips]), np.int32),
    )


@st.composite
def systems(draw, max_ops=9):
    """A few ops, chips and links with few labels; no symmetry but what chance brings."""
    n_chips, n_links, n_ops = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, max_ops))
    chip, link, label = st.integers(0, n_chips - 1), st.integers(0, n_links - 1), st.sampled_from("aab")

    def some(of, most=2):
        return draw(st.lists(of, max_size=most, unique=True))

    ops = []
    for i in range(n_ops):
        compute = draw(st.booleans())
        ops.append({
            "label": draw(label),
            "kind": "compute" if compute else "flow",
            "chip": draw(chip),
            "preds": some(st.integers(0, i - 1)) if i else [],
            "entries": some(chip) if draw(st.booleans()) else [],
            "route": [] if compute else some(link, 3),
        })  # fmt: skip
    chips = [{"label": draw(st.sampled_from("aaab")), "exits": some(st.integers(0, n_ops - 1))} for _ in range(n_chips)]
    return {"ops": ops, "chips": chips, "links": [{"label": draw(st.sampled_from("aaab"))} for _ in range(n_links)]}


@st.composite
def lifts(draw, max_ops=5):
    """A system k times over, some ops doubled, every relation led crosswise between the copies; and what it lies over.

    The second value numbers, for ops, chips and links, the things of the base. What lies over one thing has one colour:
    its neighbours lie over the same things, however they are permuted, and as a set where only the set counts.
    """
    base, k = draw(systems(max_ops)), draw(st.integers(2, 4))
    doubled, ops_over, copies = [], [], []
    for i, op in enumerate(base["ops"]):
        copies.append([])
        for _ in range(draw(st.integers(1, 2))):
            # Of doubled predecessors one or both.
            preds = [p for before in op["preds"] for p in draw(st.sampled_from([copies[before], copies[before][:1]]))]
            copies[i].append(len(doubled))
            doubled.append({**op, "preds": preds})
            ops_over += [i] * k

    def lifted(members):
        """For each of k copies, which copies of the members it is led to: a permutation for each member."""
        turns = [draw(st.permutations(range(k))) for _ in members]
        return [[m * k + turn[i] for m, turn in zip(members, turns, strict=True)] for i in range(k)]

    ops = []
    for op in doubled:
        chips = lifted([op["chip"]])
        ways = {name: lifted(op[name]) for name in ("preds", "entries", "route")}
        ops += [{**op, "chip": chips[i][0], **{name: way[i] for name, way in ways.items()}} for i in range(k)]
    exits = [lifted([c for op in chip["exits"] for c in copies[op]]) for chip in base["chips"]]
    chips = [{**chip, "exits": way[i]} for chip, way in zip(base["chips"], exits, strict=True) for i in range(k)]
    links = [dict(link) for link in base["links"] for _ in range(k)]
    return {"ops": ops, "chips": chips, "links": links}, [
        ops_over, *([i // k for i in range(len(things))] for things in (chips, links)),
    ]  # fmt: skip


def found(system, seed=0):
    return [colours.tolist() for colours in refine(as_parts(system), seed)]


@settings(max_examples=100)
@given(systems())
def test_classes_are_those_of_the_definition(system):
    assert found(system) == naive.refine(system)


@settings(max_examples=100)
@given(lifts(), st.integers(0, 2**32))
def test_classes_are_those_of_the_definition_where_there_is_symmetry(lift, seed):
    system, over = lift
    colours = found(system, seed)
    assert colours == naive.refine(system)
    for colour, thing in zip(colours, over, strict=True):
        assert len(set(zip(thing, colour, strict=True))) == len(set(thing))


@settings(max_examples=100)
@given(lifts(), st.data())
def test_one_difference_tells_apart_what_the_definition_says(lift, data):
    system, _ = lift
    kind = data.draw(st.sampled_from(["ops", "chips", "links"]))
    data.draw(st.sampled_from(system[kind]))["label"] = "odd"
    assert found(system) == naive.refine(system)


@settings(max_examples=100)
@given(lifts(), st.data())
def test_equitable_partitions_are_known_from_others(lift, data):
    """The coarsest one, what lies over one thing, and single things are; a few things recoloured, mostly not."""
    system, over = lift
    parts = as_parts(system)
    sizes = [len(system[kind]) for kind in ("ops", "chips", "links")]
    coarsest = naive.refine(system)
    alone = [list(range(n)) for n in sizes]
    recoloured = [list(colour) for colour in data.draw(st.sampled_from([coarsest, over, alone]))]
    for _ in range(data.draw(st.integers(1, 3))):
        colour = data.draw(st.sampled_from(recoloured))
        colour[data.draw(st.integers(0, len(colour) - 1))] = data.draw(st.sampled_from([*colour, -1]))
    recoloured = [naive.numbered(colour) for colour in recoloured]
    for partition in (coarsest, over, alone):
        assert naive.is_equitable(system, *partition)
    for partition in (coarsest, over, alone, recoloured):
        colours = [np.array(colour, np.int32) for colour in partition]
        assert is_equitable(parts, *colours) == naive.is_equitable(system, *partition)


BROKEN = {
    "label": ("ops", 5, {"label": "c"}),
    "kind": ("ops", 3, {"kind": "compute"}),
    "chip": ("ops", 5, {"chip": 0}),
    "another predecessor": ("ops", 5, {"preds": [1]}),
    "one predecessor more": ("ops", 5, {"preds": [3, 1]}),
    "one predecessor less": ("ops", 4, {"preds": [2, 0]}),
    "entries": ("ops", 1, {"entries": []}),
    "route": ("ops", 3, {"route": []}),
    "exits": ("chips", 1, {"exits": [1]}),
    "label of a chip": ("chips", 1, {"label": "b"}),
    "label of a link": ("links", 1, {"label": "b"}),
}


def pair():
    """Two chips that do the same, each with a link: a compute, then a flow, then a compute."""

    def op(i, kind, **more):
        return {"label": "a", "kind": kind, "chip": i, "preds": [], "entries": [], "route": [], **more}

    ops = [op(i, "compute", entries=[i]) for i in (0, 1)]
    ops += [op(i, "flow", preds=[i], route=[i]) for i in (0, 1)]
    ops += [op(i, "compute", label="b", preds=[2 + i]) for i in (0, 1)]
    chips = [{"label": "a", "exits": [4 + i]} for i in (0, 1)]
    return {"ops": ops, "chips": chips, "links": [{"label": "a"}, {"label": "a"}]}


TWO_AND_TWO = [[0, 0, 1, 1, 2, 2], [0, 0], [0, 0]]


@pytest.mark.parametrize("what", BROKEN)
def test_every_condition_of_equity_is_looked_at(what):
    system = pair()
    colours = [np.array(colour, np.int32) for colour in TWO_AND_TWO]
    assert found(system) == TWO_AND_TWO
    assert is_equitable(as_parts(system), *colours)
    kind, which, change = BROKEN[what]
    system[kind][which].update(change)
    assert not is_equitable(as_parts(system), *colours)
    assert not naive.is_equitable(system, *TWO_AND_TWO)


def test_of_predecessors_only_the_set_of_colours_counts():
    """Who waits for one of two alike starts when who waits for both does: they end together."""
    system = pair()
    system["ops"][5]["preds"] = [2, 3]
    assert found(system) == TWO_AND_TWO == naive.refine(system)
    assert is_equitable(as_parts(system), *(np.array(colour, np.int32) for colour in TWO_AND_TWO))


def test_entries_routes_and_exits_are_counted():
    """Two chips' deliveries are not one's, and two links of a class not one, though the set of colours is the same."""
    for kind, which, name, members in (
        ("ops", 1, "entries", [0, 1]),
        ("ops", 3, "route", [0, 1]),
        ("chips", 1, "exits", [4, 5]),
    ):
        system = pair()
        system[kind][which][name] = members
        assert found(system) == naive.refine(system) != TWO_AND_TWO
        assert not is_equitable(as_parts(system), *(np.array(colour, np.int32) for colour in TWO_AND_TWO))


@settings(max_examples=100)
@given(lifts())
def test_edges_and_routes_of_classes(lift):
    system, _ = lift
    parts = as_parts(system)
    op_colour, _, link_colour = refine(parts, 0)
    ops, links = op_colour.tolist(), link_colour.tolist()
    first_op, first_link = first_members(op_colour), first_members(link_colour)
    assert first_op.tolist() == [ops.index(c) for c in range(max(ops) + 1)]
    assert first_link.tolist() == [links.index(c) for c in range(max(links) + 1)]
    pred, succ = class_edges(parts, op_colour, first_op)
    pairs = list(zip(pred.tolist(), succ.tolist(), strict=True))
    assert set(pairs) == naive.class_edges(system, ops)
    assert len(pairs) == len(set(pairs))
    indptr, crossed, counts = class_routes(parts, op_colour, first_link, len(first_op))
    routes = [dict(zip(crossed[i:j].tolist(), counts[i:j].tolist(), strict=True))
              for i, j in zip(indptr[:-1], indptr[1:], strict=True)]  # fmt: skip
    assert routes == naive.class_routes(system, ops, links)
    assert sum(map(len, routes)) == len(crossed) == len(counts)
    # Flows of a class cross as many links of a class as are crossed by them, whichever way they are counted.
    for c, route in enumerate(routes):
        for k, n in route.items():
            crossings = sum(links[link] == k for op, colour in zip(system["ops"], ops, strict=True) if colour == c
                            for link in op["route"])  # fmt: skip
            assert n * links.count(k) == crossings
