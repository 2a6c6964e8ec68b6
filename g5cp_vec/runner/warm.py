"""Compile every kernel once per installation, on two cores and for one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import numpy as np

from g5cp_vec.config.grid import load_point
from g5cp_vec.cost.rows import CostRows, cost_rows
from g5cp_vec.engine._jit import CACHE_DIR, compiling, is_compiled, mark_used
from g5cp_vec.engine.arrays import Graph
from g5cp_vec.engine.csr import drop_repeated, group_by
from g5cp_vec.engine.measure import no_tags
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import build_structure
from g5cp_vec.runner.simulate import run_graph, simulate_point, simulate_rows
from g5cp_vec.runner.template import Template

# Small, and with everything that is compiled: classes, folded layers, rows, and the times of every op.
_POINT = {
    "name": "warm",
    "fixed": {
        "model": "llama-3.1-8b", "chip": "h200-sxm", "topology": "flat-450", "phase": "prefill",
        "n_chips": 4, "tp": 2, "cp": 2, "seq_len": 1024,
    },
}  # fmt: skip


@cache
def warm() -> None:
    """Make sure that the kernels are compiled and cached; nothing to do after the first time."""
    if is_compiled():
        mark_used()
        return
    with compiling() as has_to:
        if has_to:
            try:
                _run_everything()
            except OSError as error:
                problem = f"compiled kernels cannot be kept here: {error.strerror or error}"
                raise ConfigError(f"{CACHE_DIR}: {problem}; make room, or name a folder in NUMBA_CACHE_DIR") from None


def _run_everything() -> None:
    with _structures_beside():
        _simulate_nothing()
    # What the other process could not keep is compiled now.
    template, costs = compile_structures()
    simulate_rows(template, costs)
    simulate_point(template, costs, 0)


@contextmanager
def _structures_beside() -> Iterator[None]:
    """Let a process of its own compile what structures take: a quarter of everything, and nothing of the rest."""
    command = [sys.executable, "-c", f"from {__name__} import compile_structures; compile_structures()"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": str(CACHE_DIR.parent)}
    nowhere = subprocess.DEVNULL
    beside = None
    with suppress(OSError):
        beside = subprocess.Popen(command, env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    try:
        yield
        if beside:
            beside.wait()
    finally:
        if beside:
            beside.kill()


def _simulate_nothing() -> None:
    """Compile the simulation, with a graph of no ops, which takes no other kernel to build."""
    i8, i32, f64 = np.zeros(0, np.int8), np.zeros(0, np.int32), np.zeros(0)
    indptr = np.zeros(1, np.int64)
    graph = Graph(i8, i32, i32, i32, i32, indptr, i32, indptr, i32, f64, i32, indptr, i32, i32, i32)
    run_graph(graph, no_tags(0, 0), (np.zeros((1, 0)),) * 4)


def compile_structures() -> tuple[Template, CostRows]:
    """Compile what structures take; return a small one with its costs."""
    expansion = load_point(_POINT).expand()
    dep = expansion.deployments[0]
    assert not isinstance(dep, str)
    network = build_network(dep.topology, dep.n_chips)
    structure = build_structure(dep, network)
    load = build_load(dep, expansion.seq_len, expansion.batch, expansion.cached_tokens)
    template = Template(structure, reduced=True)
    chain = template.chain(template.folds()[0])
    template.expand(chain, np.zeros(len(chain.tags.op_role)), np.zeros((len(chain.tags.runs), 2)))
    drop_repeated(*group_by(2, np.zeros(1, np.int32), np.ones(1, np.int32)))  # which only a replay needs
    return template, cost_rows(dep, structure.keys, network, load, 1)
