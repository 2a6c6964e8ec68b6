"""Durations of compute ops: each part at the slower of its arithmetic and its memory traffic."""

from __future__ import annotations

from typing import Any

import numpy as np

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.parts import AttentionShape, Part


def part_seconds(dep: Deployment, part: Part) -> Any:
    """Return max(flops / (peak * e), bytes / (bandwidth * e)) in seconds (float or array)."""
    chip = dep.chip
    memory_s = part.bytes / (chip.hbm_bandwidth_bytes_per_s * chip.efficiency.memory)
    if part.unit == "memory":
        return memory_s
    if part.unit == "gemm":
        efficiency: Any = chip.efficiency.gemm
    elif isinstance(part.shape, AttentionShape) and part.shape.phase == "prefill":
        efficiency = chip.efficiency.prefill_attention(part.shape.q_tokens)
    else:
        efficiency = chip.efficiency.attention
    arithmetic_s = part.flops / (chip.peak(part.dtype) * efficiency)
    return np.maximum(arithmetic_s, memory_s)


def op_overhead_s(dep: Deployment) -> float:
    """Return the fixed cost of one compute op under the deployment's runtime (s)."""
    return dep.runtime.op_overhead_s(dep.phase)


def op_seconds(dep: Deployment, parts: list[Part]) -> Any:
    """Return the duration of one compute op: its parts one after another, plus the fixed overhead (s)."""
    return sum(part_seconds(dep, part) for part in parts) + op_overhead_s(dep)
