"""Hypothesis profiles: HYPOTHESIS_PROFILE=ci (default, the same examples every time) or dev (fresh random ones)."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from g5cp_vec.runner.warm import warm

# Their assertions explain themselves as those of test files do.
pytest.register_assert_rewrite("checks", "commands", "replays")

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
settings.register_profile("ci", max_examples=200, derandomize=True, database=None, **COMMON)
settings.register_profile("dev", max_examples=50, **COMMON)
settings.register_profile("nightly", max_examples=5000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels():
    """Several test processes may start on an empty cache at once; only one of them compiles."""
    warm()
