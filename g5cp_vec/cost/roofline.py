"""Durations of compute ops: as measured where the chip is calibrated, else each part at its roofline."""

from __future__ import annotations

from typing import Any

import numpy as np

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.calibration import kindred_seconds, price_part
from g5cp_vec.cost.parts import AttentionShape, Part


def part_seconds(dep: Deployment, part: Part) -> Any:
    """Return the duration of one part in seconds (float or array).

    The chip's calibration decides (:mod:`g5cp_vec.cost.calibration`); experts of a type that was not measured go by one
    that was, and what it has nothing for takes max(flops / (peak * e), bytes / (bandwidth * e)) under the chip's
    ``efficiency``.
    """
    asked = dep.chip, dep.model.hidden, part, dep.runtime.kernels
    price = price_part(*asked)
    if price is not None:
        return price.seconds
    seconds = kindred_seconds(*asked)
    return roofline_seconds(dep, part) if seconds is None else seconds


def roofline_seconds(dep: Deployment, part: Part) -> Any:
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
