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
def lifts(draw, max_ops=6):
    """A system k times over, every relation led crosswise between the copies; also the sheet that each op lies over.

    What lies over one thing has one colour: its neighbours lie over the same things, however they are permuted.
    """
    base, k = draw(systems(max_ops)), draw(st.integers(2, 4))

    def over(members):
        """For each of k copies, which copies of the members it is led to: a permutation for each member."""
        turns = [draw(st.permutations(range(k))) for _ in members]
        return [[m * k + turn[i] for m, turn in zip(members, turns, strict=True)] for i in range(k)]

    ops = []
    for op in base["ops"]:
        chips = over([op["chip"]])
        ways = {name: over(op[name]) for name in ("preds", "entries", "route")}
        ops += [{**op, "chip": chips[i][0], **{name: way[i] for name, way in ways.items()}} for i in range(k)]
    chips = [{**chip, "exits": exits} for chip in base["chips"] for exits in over(chip["exits"])]
    return {"ops": ops, "chips": chips, "links": [dict(link) for link in base["links"] for _ in range(k)]}, k


def found(system, seed=0):
    return [colours.tolist() for colours in refine(as_parts(system), seed)]


@settings(max_examples=100)
@given(systems())
def test_classes_are_those_of_the_definition(system):
    assert found(system) == naive.refine(system)


@settings(max_examples=100)
@given(lifts(), st.integers(0, 2**32))
def test_classes_are_those_of_the_definition_where_there_is_symmetry(lift, seed):
    system, k = lift
    colours = found(system, seed)
    assert colours == naive.refine(system)
    for colour in colours:
        over = [colour[i : i + k] for i in range(0, len(colour), k)]
        assert all(len(set(sheet)) == 1 for sheet in over)


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
    """The coarsest one, the sheets and single things are equitable; a few things recoloured, mostly not."""
    system, k = lift
    parts = as_parts(system)
    sizes = [len(system[kind]) for kind in ("ops", "chips", "links")]
    coarsest = naive.refine(system)
    sheets, alone = [[i // k for i in range(n)] for n in sizes], [list(range(n)) for n in sizes]
    recoloured = [list(colour) for colour in data.draw(st.sampled_from([coarsest, sheets, alone]))]
    for _ in range(data.draw(st.integers(1, 3))):
        colour = data.draw(st.sampled_from(recoloured))
        colour[data.draw(st.integers(0, len(colour) - 1))] = data.draw(st.sampled_from([*colour, -1]))
    recoloured = [naive.numbered(colour) for colour in recoloured]
    for partition in (coarsest, sheets, alone):
        assert naive.is_equitable(system, *partition)
    for partition in (coarsest, sheets, alone, recoloured):
        colours = [np.array(colour, np.int32) for colour in partition]
        assert is_equitable(parts, *colours) == naive.is_equitable(system, *partition)


@pytest.mark.parametrize("broken", ["label", "kind", "chip", "preds", "entries", "route", "exits", "chip's", "link's"])
def test_every_condition_of_equity_is_looked_at(broken):
    """Two chips that do the same, each with its link; one thing of the second changed, the colours left."""

    def op(i, kind, **more):
        return {"label": "a", "kind": kind, "chip": i, "preds": [], "entries": [], "route": [], **more}

    ops = [op(i, "compute", entries=[i]) for i in (0, 1)]
    ops += [op(i, "flow", preds=[i], route=[i]) for i in (0, 1)]
    ops += [op(i, "compute", label="b", preds=[2 + i]) for i in (0, 1)]
    system = {"ops": ops, "chips": [{"label": "a", "exits": [4 + i]} for i in (0, 1)], "links": [{"label": "a"}] * 2}
    colours = [np.array(c, np.int32) for c in ([0, 0, 1, 1, 2, 2], [0, 0], [0, 0])]
    assert found(system) == [c.tolist() for c in colours]
    assert is_equitable(as_parts(system), *colours)
    change = {
        "label": (ops[5], {"label": "c"}), "kind": (ops[3], {"kind": "compute"}), "chip": (ops[5], {"chip": 0}),
        "preds": (ops[5], {"preds": [1]}), "entries": (ops[1], {"entries": []}), "route": (ops[3], {"route": []}),
        "exits": (system["chips"][1], {"exits": [1]}), "chip's": (system["chips"][1], {"label": "b"}),
    }  # fmt: skip
    if broken == "link's":
        system["links"] = [{"label": "a"}, {"label": "b"}]
    else:
        thing, values = change[broken]
        thing.update(values)
    assert not is_equitable(as_parts(system), *colours)
    assert not naive.is_equitable(system, *(c.tolist() for c in colours))


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
