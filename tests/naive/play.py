"""A workload (the ``replay`` format) played by the letter of ``semantics.md`` §1 and §2.

In exact mode every number is a fraction of the floats that were given, so a disagreement with the kernel is never
rounding of ours.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from math import inf

# Two event times are one instant when they agree to this relative difference.
INSTANT = Fraction(1, 10**12)
# Event times closer than this are equal up to rounding, so float arithmetic groups them as exact arithmetic does.
SAME = Fraction(1, 10**14)


def solve_maxmin(routes, capacities, counts=None, number=Fraction):
    """Return the max-min fair rate of every flow by progressive filling.

    ``routes[f]`` lists the links of flow ``f`` (at least one); ``counts[f]``, parallel to it, says how many times the
    flow's rate loads each of them (once when left out).
    """
    if counts is None:
        counts = [[1] * len(route) for route in routes]
    room = [number(capacity) for capacity in capacities]
    level = number(0)
    rates = [None] * len(routes)
    rising = set(range(len(routes)))
    while rising:
        load = defaultdict(int)
        for flow in rising:
            for link, count in zip(routes[flow], counts[flow], strict=True):
                load[link] += count
        possible = {link: room[link] / load[link] for link in load}
        step = min(possible.values())
        level += step
        for link in load:
            room[link] -= load[link] * step
        saturated = {link for link in load if possible[link] == step}
        for flow in sorted(rising):
            if not saturated.isdisjoint(routes[flow]):
                rates[flow] = level
                rising.remove(flow)
    return rates


def simulate(workload, exact=True):
    """Return ``(makespan, start, finish)`` in seconds: fractions, or floats when ``exact`` is false."""
    start, finish, _ = _play(workload, Fraction if exact else float)
    return max(finish, default=0), start, finish


def simulate_with_gap(workload, exact=True):
    """Return ``(makespan, start, finish, gap)``, the last as `min_event_gap` defines it."""
    start, finish, gap = _play(workload, Fraction if exact else float)
    return max(finish, default=0), start, finish, gap


def min_event_gap(workload):
    """Return the smallest relative distance by which an expected event missed an instant, equal times left out.

    Below about 1e-10 it is rounding that decides whether float arithmetic sees one instant or two.
    """
    return _play(workload, Fraction)[2]


def _play(workload, number):
    links, ops = workload["links"], workload["ops"]
    capacities = [number(link["bw"]) for link in links]
    successors = [[] for _ in ops]
    n_missing = [0] * len(ops)
    for before, after in {tuple(dep) for dep in workload["deps"]}:
        successors[before].append(after)
        n_missing[after] += 1

    now, gap = number(0), inf
    start, finish = [None] * len(ops), [None] * len(ops)
    queue = [[] for _ in range(workload["chips"])]  # ready computes of each chip
    busy = [False] * workload["chips"]
    alarm = {}  # compute -> its end; flow -> the end of its latency
    moving = {}  # flow -> bytes still to move
    ended = []  # ops that end in this instant

    def release(op):
        """All predecessors of `op` have ended."""
        what = ops[op]
        if what["kind"] == "compute":
            queue[what["chip"]].append(op)
            return
        start[op] = now
        wait = number(what.get("lat", 0)) + sum(number(links[link].get("lat", 0)) for link in what["route"])
        if wait > 0:
            alarm[op] = now + wait
        else:
            move(op)

    def move(op):
        """The latency of flow `op` has passed."""
        if ops[op]["route"] and ops[op]["bytes"] > 0:
            moving[op] = number(ops[op]["bytes"])
        else:
            ended.append(op)

    def end(op):
        finish[op] = now
        if ops[op]["kind"] == "compute":
            busy[ops[op]["chip"]] = False
        for after in successors[op]:
            n_missing[after] -= 1
            if n_missing[after] == 0:
                release(after)

    def choose(chip):
        """Free `chip` takes the first of its ready computes."""
        op = min(queue[chip], key=lambda op: (ops[op].get("prio", 0), op))
        queue[chip].remove(op)
        busy[chip] = True
        start[op] = now
        if ops[op]["secs"] > 0:
            alarm[op] = now + number(ops[op]["secs"])
        else:
            ended.append(op)

    for op in [op for op in range(len(ops)) if n_missing[op] == 0]:
        release(op)
    while True:
        while True:  # one instant
            while ended:
                end(ended.pop())
            for chip in range(workload["chips"]):
                if queue[chip] and not busy[chip]:
                    choose(chip)
            if not ended:
                break

        flows = sorted(moving)
        rates = dict(zip(flows, solve_maxmin([ops[f]["route"] for f in flows], capacities, number=number), strict=True))
        expected = alarm | {flow: now + moving[flow] / rates[flow] for flow in flows}
        if not expected:
            break
        then = min(expected.values())
        for date in expected.values():
            if date > then * (1 + number(SAME)) > 0:
                gap = min(gap, (date - then) / then)
        for flow in flows:
            moving[flow] -= rates[flow] * (then - now)
        now = then
        for op in sorted(op for op, date in expected.items() if date <= then * (1 + number(INSTANT))):
            if op in moving:
                del moving[op]
                ended.append(op)
            else:
                del alarm[op]
                if ops[op]["kind"] == "compute":
                    ended.append(op)
                else:
                    move(op)
    return start, finish, gap
