"""Compile every kernel once per installation, in one process at a time."""

from __future__ import annotations

from functools import cache

import numpy as np

from g5cp_vec.config.grid import load_point
from g5cp_vec.cost.rows import cost_rows
from g5cp_vec.engine._jit import CACHE_DIR, compiling, is_compiled, mark_used
from g5cp_vec.engine.csr import drop_repeated, group_by
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import build_structure
from g5cp_vec.runner.simulate import simulate_point, simulate_rows
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
    expansion = load_point(_POINT).expand()
    dep = expansion.deployments[0]
    assert not isinstance(dep, str)
    network = build_network(dep.topology, dep.n_chips)
    structure = build_structure(dep, network)
    load = build_load(dep, expansion.seq_len, expansion.batch, expansion.cached_tokens)
    template = Template(structure, reduced=True)
    costs = cost_rows(dep, structure.keys, network, load, 1)
    simulate_rows(template, costs)
    drop_repeated(*group_by(2, np.zeros(1, np.int32), np.ones(1, np.int32)))  # which only a replay needs
    simulate_point(template, costs, 0)
