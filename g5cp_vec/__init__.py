"""Vectorised batch simulation of context-parallel LLM serving: grids of deployments in, TTFT and TPOT out."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["replay", "run", "sweep"]

# Public name -> (module, attribute); imported on first use so that importing the package compiles and loads nothing.
_PUBLIC = {
    "replay": ("g5cp_vec.runner.workload", "replay_workload"),
    "run": ("g5cp_vec.runner.api", "run_point"),
    "sweep": ("g5cp_vec.runner.api", "run_sweep"),
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _PUBLIC[name]
    return getattr(import_module(module), attribute)
