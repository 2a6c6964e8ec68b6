"""Slow, obvious twins of the fast routines; nothing of the package is imported here."""

from naive.costs import (
    causal_flops,
    expert_rows,
    memory_of,
    message_sizes,
    op_costs,
    ring_step_flops,
    size_bytes,
    weight_tensors,
)
from naive.graph import build_graph, hgx_network, stages_of, switch_network
from naive.play import min_event_gap, simulate, simulate_with_gap, solve_maxmin
from naive.reductions import Events, class_edges, class_routes, is_equitable, numbered, refine, repeats, unfold

__all__ = [
    "Events", "build_graph", "causal_flops", "class_edges", "class_routes", "expert_rows", "hgx_network",
    "is_equitable", "memory_of", "message_sizes", "min_event_gap", "numbered", "op_costs", "refine", "repeats",
    "ring_step_flops", "simulate", "simulate_with_gap", "size_bytes", "solve_maxmin", "stages_of", "switch_network",
    "unfold", "weight_tensors",
]  # fmt: skip
