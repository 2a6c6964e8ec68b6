"""What operations cost beyond their work: launches, host steps, constants per layer and request.

All of it is the runtime's; under the ideal one everything here is zero.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.parts import Part
from g5cp_vec.cost.roofline import op_overhead_s, part_seconds
from g5cp_vec.mapping.graph import ComputeKey
from g5cp_vec.mapping.load import Count, Load

# Begin with the norm of what an all-reduce leaves.
_AFTER_ALL_REDUCE = ("qkv", "ffn", "router", "lm_head")
# Reads the keys and values of a decode step.
_DECODE_ATTENTION = ("attention", "partial", "ring_partial", "shard", "sparse")


def extra_seconds(dep: Deployment, load: Load, parts: list[Part], key: ComputeKey) -> Any:
    """Return what a compute op costs beyond its work and the overhead that every op has (s); may be an array.

    The constant of a layer stands with its first op, that of a request with the embedding. An element-wise kernel that
    would be shorter than the runtime's floor costs the difference.
    """
    seconds = _constant_seconds(dep, load, key)
    floor_s = dep.runtime.kernel_floor_s
    if floor_s > 0:
        for kernel in _elementwise_kernels(dep, parts, key):
            seconds = seconds + np.maximum(floor_s - sum(part_seconds(dep, part) for part in kernel), 0.0)
    return seconds


def kernels(dep: Deployment, parts: list[Part], key: ComputeKey) -> int:
    """Return how many kernels an op launches."""
    n_products = sum(part.unit != "memory" for part in parts)
    return n_products + len(_elementwise_kernels(dep, parts, key))


def _elementwise_kernels(dep: Deployment, parts: list[Part], key: ComputeKey) -> list[list[Part]]:
    """Return the element-wise parts of an op by kernel, without one that the all-reduce before it takes over."""
    runtime = dep.runtime
    if not runtime.fuses_elementwise:
        found = [[part] for part in parts if part.unit == "memory"]
    else:
        runs = groupby(parts, key=lambda part: part.unit)
        found = [list(run) for unit, run in runs if unit == "memory"]
    is_after = dep.tp > 1 and key[0] in _AFTER_ALL_REDUCE and bool(parts) and parts[0].unit == "memory"
    return found[1:] if runtime.fuses_all_reduce and is_after else found


def _constant_seconds(dep: Deployment, load: Load, key: ComputeKey) -> Any:
    runtime, prefill, name = dep.runtime, dep.phase == "prefill", key[0]
    if name == "ring_sync":
        return runtime.ring_step_sync_s
    if name == "qkv":
        return runtime.prefill_layer_s if prefill else runtime.decode_layer_s
    if name == "embed" and prefill:
        return runtime.prefill_request_s + runtime.cached_prefill_request_s * np.not_equal(load.cached_unpadded, 0)
    if name == "embed":
        return runtime.decode_request_s
    if not prefill and name.partition("@")[0] in _DECODE_ATTENTION:
        return runtime.split_kv_sequence_s * attended_sequences(dep, load)
    return 0.0


def fixed_seconds(dep: Deployment, load: Load, parts: list[Part], key: ComputeKey) -> Any:
    """Return everything about a compute op's duration that is no work (s)."""
    return op_overhead_s(dep) + extra_seconds(dep, load, parts, key)


def attended_sequences(dep: Deployment, load: Load) -> Count:
    """Return the sequences that one decode attention op attends: all of them, or those of one owner."""
    return load.batch if dep.has_owner else load.rank_tokens


def slowed(compute_s: Any, transfer_s: Any, slowdown: float) -> Any:
    """Return how long a compute takes that is slower by a fraction while a transfer runs beside it (s).

    Both begin together. While the transfer lasts the compute advances at 1 / (1 + slowdown) of its speed, afterwards
    at full speed; ``transfer_s`` is the transfer's time on a network of its own.
    """
    whole = compute_s * (1.0 + slowdown)
    return np.where(whole <= transfer_s, whole, compute_s + transfer_s * slowdown / (1.0 + slowdown))
