"""Recorded workloads, and rows of costs to play from their tapes."""

from __future__ import annotations

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_EVENTS, OK, RECORDS, Costs, make_workspace
from g5cp_vec.engine.schedule import simulate
from g5cp_vec.engine.tape import Tape, make_recorder, play
from g5cp_vec.runner.workload import compile_workload


@kernel(entry=True)
def _simulate(g, c, w, r, info):
    return simulate(g, c, w, r, info)


@kernel(entry=True)
def _play(tape, c, instant_s):
    return play(tape, c, instant_s)


class Recorded:
    """A graph and a tape of one row of costs through it."""

    def __init__(self, graph, costs):
        self.graph = graph
        self.w, self.r = make_workspace(graph), make_recorder(graph)
        self.w.counter[RECORDS] = 1
        self.times = self.simulate(costs)
        self.is_whole = self.w.counter[RECORDS] == 1  # unless rates changed too often
        self.w.counter[RECORDS] = 0
        self.at = self.w.at.copy()
        n = int(self.w.counter[N_EVENTS]) + 1
        self.tape = Tape(n, self.r.first, self.r.clock, self.r.change, self.r.before, np.arange(n, dtype=np.uint32))

    def simulate(self, costs):
        assert _simulate(self.graph, costs, self.w, self.r, np.zeros(2, np.int64)) == OK
        return self.w.instant_s[self.w.at["start"]], self.w.instant_s[self.w.at["finish"]]

    def play(self, costs):
        """Times of every op, None where the tape does not say that they are these."""
        instant_s = np.zeros(len(self.w.instant_s))
        if not _play(self.tape, costs, instant_s):
            return None
        return instant_s[self.at["start"]], instant_s[self.at["finish"]]


def recorded(load):
    graph, costs = compile_workload(load)
    return Recorded(graph, costs), costs


def scaled(costs, factors):
    """Costs times a factor for each duration, number of bytes and latency, taken from the list in turn."""
    n = [len(column) for column in costs[:3]]
    each = np.resize(np.array(factors, float), sum(n))
    parts = np.split(each, np.cumsum(n)[:-1])
    return Costs(*(column * part for column, part in zip(costs[:3], parts, strict=True)), costs.capacity_bytes_per_s)


# Nearly 1, where other events come to fall on an instant; plain fractions, where ties are common; and anything.
factors = st.lists(
    st.sampled_from([1.0, 1.0, 1e-20, 0.5, 2.0, 1 + 1e-13, 1 - 1e-13, 1 + 1e-12, 1 - 1e-12, 1 + 3e-12, 1 + 1e-9, 1.001])
    | st.floats(0.5, 2),
    min_size=1,
    max_size=12,
)


def with_amounts(costs, amounts):
    """Costs with other seconds or bytes of some ops, every one of which has costs of its own."""
    amount = costs.bytes.copy()
    amount[list(amounts)] = list(amounts.values())
    return Costs(amount, amount, costs.latency_s, costs.capacity_bytes_per_s)


def assert_played_as_simulated(tape, costs, rows):
    """Every row of factors that is played has the very floats of its simulation."""
    assume(tape.is_whole)
    for row in rows:
        changed = scaled(costs, row)
        played = tape.play(changed)
        if played is not None:
            np.testing.assert_array_equal(played, tape.simulate(changed))
