"""What `replay` refuses: one line that names the place."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import naive
import pytest
from replays import compute, flow, workload

from g5cp_vec import replay
from g5cp_vec.errors import ConfigError

ROOT = str(Path(__file__).parent.parent)

GOOD = workload(
    [compute(0, 1), flow([0, 1], 5, 0.5), compute(1, 2, 3)], [(0, 1), (1, 2)], bw=[1, 2], chips=2, lat=[0.1, 0.2]
)
GONE = object()
BAD_QUANTITIES = [math.nan, math.inf, -math.inf, -1, "3", None, True, [1]]


def bad(place, value, says=None):
    return pytest.param(place, value, says or place, id=f"{place}={'missing' if value is GONE else repr(value)}")


REFUSED = [
    *(bad(f"ops[{i}].{key}", v) for i, key in [(0, "secs"), (1, "bytes"), (1, "lat")] for v in BAD_QUANTITIES),
    *(bad("links[1].lat", v) for v in BAD_QUANTITIES),
    *(bad("links[1].bw", v) for v in [*BAD_QUANTITIES, 0, -0.0]),
    *(bad("ops[2].prio", v) for v in [True, "1", None, math.nan, [0]]),
    *(bad("ops[2].chip", v) for v in [2, -1, 0.5, True, "0", None, math.nan]),
    *(bad("ops[1].route[1]", v, "ops[1].route") for v in [2, -1, 0.5, True, "0", None, math.nan, 0]),
    *(bad("ops[1].route", v) for v in [0, None, "01", {"0": 1}]),
    *(bad("deps[1][0]", v, "deps[1]") for v in [3, -1, 0.5, True, "0", None]),
    *(bad("deps[1][1]", v, "deps[1]") for v in [3, -1, 1 << 40]),
    *(bad("deps[1]", v) for v in [[0], [0, 1, 2], [], 1, None, "01"]),
    *(bad("ops[1].kind", v) for v in ["copy", "", None, 1, True, "Flow"]),
    *(bad("chips", v) for v in [-1, 1.5, True, "2", None, math.nan]),
    *(bad(place, GONE) for place in ["links", "chips", "ops", "deps"]),
    *(bad(place, GONE) for place in ["links[0].bw", "ops[0].kind", "ops[0].chip", "ops[0].secs"]),
    *(bad(place, GONE) for place in ["ops[1].route", "ops[1].bytes"]),
    *(bad(place, v) for place in ["links", "ops", "deps"] for v in [None, 3, {"0": 1}, "[]"]),
    *(bad(place, v) for place in ["links[0]", "ops[1]"] for v in [None, 3, [], "flow"]),
    *(bad(place, 1) for place in ["links[0].bandwidth", "ops[0].bytes", "ops[1].latt", "dep"]),  # misspelt or misplaced
]


def broken(place, value):
    """GOOD with `value` at `place`, or without anything there."""
    load = deepcopy(GOOD)
    *path, last = [
        int(part) if part.isdigit() else part for part in place.replace("]", "").replace("[", ".").split(".")
    ]
    at = load
    for part in path:
        at = at[part]
    if value is GONE:
        del at[last]
    else:
        at[last] = value
    return load


def test_the_unbroken_one_is_fine():
    assert replay(GOOD).makespan == pytest.approx(float(naive.simulate(GOOD)[0]))


@pytest.mark.parametrize(("place", "value", "says"), REFUSED)
def test_refused_with_its_place(place, value, says):
    with pytest.raises(ConfigError) as caught:
        replay(broken(place, value))
    assert len(str(caught.value).splitlines()) == 1
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("load", "place"),
    [
        (workload([flow([0], 1)]), "ops[0].route"),
        (workload([compute(0, 1)]), "ops[0].chip"),
        (workload([], [(0, 0)]), "deps[0]"),
    ],
)
def test_there_is_nothing_to_name(load, place):
    with pytest.raises(ConfigError) as caught:
        replay(load)
    assert place in str(caught.value).splitlines()[0]


@pytest.mark.parametrize(
    "load",
    [
        workload([flow([0], 1e308)], bw=[1e-300]),
        workload([compute(0, 1e308), compute(0, 1e308)], chips=1),
        workload([flow([0, 1], 1)], bw=[1, 1], lat=[1e308, 1e308]),
    ],
)
def test_ends_beyond_floats(load):
    with pytest.raises(ConfigError, match=r"ops\[") as caught:
        replay(load)
    assert len(str(caught.value).splitlines()) == 1


ENDLESS = """
from g5cp_vec import replay
from g5cp_vec.errors import G5cpError

for capacity in (1e-310, 5e-324):
    for lats in ((0, 0, 0), (0, 0.25, 0.5)):
        ops = [{"kind": "flow", "route": [0], "bytes": capacity, "lat": lat} for lat in lats]
        try:
            print(round(replay({"links": [{"bw": capacity}], "chips": 0, "ops": ops, "deps": []}).makespan, 6))
        except G5cpError as error:
            print(error)
"""


def test_subnormal_shares_do_not_loop_for_ever():
    # A share below the smallest normal float does not fill its link again when multiplied back. In a process of its
    # own, since a kernel that loops cannot be interrupted.
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS], check=True, timeout=60, env=env, capture_output=True, text=True
    )
    *plain, together, one_by_one = done.stdout.splitlines()
    assert plain == ["3.0", "3.0"]
    # A third of the smallest float is nothing, so they never end.
    assert "ops[" in together
    assert "ops[" in one_by_one


@pytest.mark.parametrize("load", [[], [GOOD], 3, None, True])
def test_not_an_object(load):
    with pytest.raises(ConfigError) as caught:
        replay(load)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("deps", [[(0, 0)], [(0, 1), (1, 0)], [(0, 1), (1, 2), (2, 1)], [(2, 0), (0, 1), (1, 2)]])
def test_cycle(deps):
    with pytest.raises(ConfigError, match="cycle") as caught:
        replay({**GOOD, "deps": [list(dep) for dep in deps]})
    assert len(str(caught.value).splitlines()) == 1
    assert "ops[" in str(caught.value) or "deps" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"links": [}', "[]", '"links"', "NaN"])
def test_broken_file(tmp_path, text):
    path = tmp_path / "workload.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        replay(path)
    assert len(str(caught.value).splitlines()) == 1
    assert "workload.json" in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        replay(tmp_path / "nowhere.json")
