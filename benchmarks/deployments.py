"""Deployments made ready to simulate, step by step as the runner does it, so that each step can be timed."""

from __future__ import annotations

from typing import Any

import numpy as np

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import VALID, Expansion
from g5cp_vec.config.grid import load_grid
from g5cp_vec.cost.rows import CostRows, cost_rows
from g5cp_vec.engine.arrays import Costs
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.network import Network, build_network
from g5cp_vec.mapping.structure import Structure, build_structure
from g5cp_vec.runner.template import Template

# 61 layers on 64 chips in nodes of eight, rings of 16: more than 200,000 ops.
LARGE = {
    "model": "deepseek-v3-671b", "topology": "hgx-8", "n_chips": 64, "tp": 4, "cp": 16, "ep": 4, "seq_len": "128K",
}  # fmt: skip
# One shape at any size: aligned and symmetric, replicas take what is left of the chips.
SHAPE = {"model": "llama-3.1-405b", "topology": "flat-450", "tp": 8, "cp": 8, "seq_len": "128K"}


def deploy(**keys: Any) -> tuple[Deployment, Network, Expansion]:
    """Return the deployment of the keys of a point file, its network, and its rows; ``seq_len`` may be a list."""
    fixed = {"chip": "h100-sxm", "phase": "prefill", "dp": "auto", **keys}
    axes = {key: fixed.pop(key) for key in ("seq_len",) if isinstance(fixed[key], list)}
    grid = {"name": "benchmark", "fixed": fixed} | ({"axes": axes} if axes else {})
    expansion = load_grid(grid, point=not axes).expand()
    assert (expansion.reason_code == VALID).all(), expansion.reasons
    dep = expansion.deployments[0]
    assert isinstance(dep, Deployment)
    assert len(expansion.deployments) == 1
    return dep, build_network(dep.topology, dep.n_chips), expansion


def prepare(**keys: Any) -> tuple[Structure, CostRows]:
    """Return structure and costs of the points that the keys name."""
    dep, network, expansion = deploy(**keys)
    structure = build_structure(dep, network)
    load = build_load(dep, expansion.seq_len, expansion.batch, expansion.cached_tokens)
    return structure, cost_rows(dep, structure.keys, network, load, len(expansion.seq_len))


def build_template(dep: Deployment, network: Network) -> Template:
    """Build a structure, refine it, and build the chain that its points try first."""
    template = Template(build_structure(dep, network, symmetric=True), reduced=True)
    template.chain(template.folds()[0])
    return template


def costs_of(costs: CostRows, row: int) -> Costs:
    """Return one row of costs as the engine takes it."""
    return Costs(costs.duration_s[row], costs.bytes[row].astype(np.float64), costs.latency_s[row], costs.capacity[row])


def lengths(n: int) -> list[int]:
    """Return ``n`` sequence lengths from 8K on, all different."""
    return [8192 + 1024 * i for i in range(n)]
