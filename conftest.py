"""Tests that take long are left out, in every folder, unless a marker expression names them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests; ``-m slow`` runs these alone, ``-m 'slow or not slow'`` all."""
    if "slow" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes long; ask for it with -m 'slow or not slow'"))
