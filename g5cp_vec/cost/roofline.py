"""Durations of compute ops: each part at the slower of its arithmetic and its memory traffic."""

from __future__ import annotations

from typing import Any

import numpy as np

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.parts import Part


def part_seconds(dep: Deployment, part: Part) -> Any:
    """Return max(flops / (peak * e), bytes / (bandwidth * e)) in seconds (float or array)."""
    chip = dep.chip
    memory_s = part.bytes / (chip.hbm_bandwidth_bytes_per_s * chip.efficiency.memory)
    if part.unit == "memory":
        return memory_s
    efficiency = chip.efficiency.gemm if part.unit == "gemm" else chip.efficiency.attention
    arithmetic_s = part.flops / (chip.peak(part.dtype) * efficiency)
    return np.maximum(arithmetic_s, memory_s)


def op_overhead_s(dep: Deployment) -> float:
    """Return the fixed cost of one compute op under the deployment's runtime (s)."""
    runtime = dep.runtime
    return runtime.prefill_op_overhead_s if dep.phase == "prefill" else runtime.decode_op_overhead_s


def op_seconds(dep: Deployment, parts: list[Part]) -> Any:
    """Return the duration of one compute op: its parts one after another, plus the fixed overhead (s)."""
    return sum(part_seconds(dep, part) for part in parts) + op_overhead_s(dep)
