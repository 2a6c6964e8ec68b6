"""Answers of an established simulator (see data/oracle/SOURCE.md): the kernel and the naive twin both reach them."""

from __future__ import annotations

import json
from pathlib import Path

import naive
import numpy as np
import pytest

from g5cp_vec import replay

CASES = sorted((Path(__file__).parent / "data" / "oracle").glob("*.json"))


def twin(workload):
    """The naive simulation in floats: fractions of a few hundred ops grow too long."""
    return naive.simulate(workload, exact=False)


def kernel(workload):
    """The package's own answer in the same shape."""
    result = replay(workload)
    return result.makespan, result.start, result.finish


def test_cases_are_there():
    assert len(CASES) >= 6


@pytest.mark.parametrize("simulate", [kernel, twin])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_agrees_with_the_oracle(path, simulate):
    case = json.loads(path.read_text())
    makespan, start, finish = simulate(case["workload"])
    tolerance = (1e-9 + 1e-12 * case["amplification"]) * case["makespan"]
    error = np.abs(np.asarray(finish) - case["finish"])
    wrong = np.flatnonzero(error > tolerance)
    if wrong.size:
        first = min(wrong, key=lambda op: case["finish"][op])
        pytest.fail(
            f"{wrong.size} of {case['n_ops']} ops are off; the earliest is ops[{first}], "
            f"{case['workload']['ops'][first]}, which ends at {finish[first]!r} instead of {case['finish'][first]!r}"
        )
    assert abs(makespan - case["makespan"]) <= tolerance
    assert makespan == max(finish)
    assert np.all(np.asarray(start) <= np.asarray(finish))
