"""What operations cost beyond their work: launches, host steps, constants per layer and request, library latencies.

All of it is the runtime's; under the ideal one everything here is zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.parts import Part
from g5cp_vec.cost.roofline import op_overhead_s, part_seconds
from g5cp_vec.mapping.graph import LIBRARY_CALLS, ComputeKey
from g5cp_vec.mapping.load import Count, Load
from g5cp_vec.mapping.network import Network

# Reads the keys and values of a decode step.
_DECODE_ATTENTION = ("attention", "partial", "ring_partial", "shard")


def extra_seconds(dep: Deployment, load: Load, parts: list[Part], key: ComputeKey) -> Any:
    """Return what a compute op costs beyond its work and the overhead that every op has (s); may be an array.

    The constant of a layer stands with its first op, that of a request with the embedding. An element-wise kernel that
    would be shorter than the runtime's floor costs the difference.
    """
    seconds = _constant_seconds(dep, load, key)
    floor_s = dep.runtime.kernel_floor_s
    if floor_s > 0:
        for part in parts:
            if part.unit == "memory":
                seconds = seconds + np.maximum(floor_s - part_seconds(dep, part), 0.0)
    return seconds


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


def transfer_latencies(dep: Deployment, network: Network) -> list[float]:
    """Return the latency of every latency id (s): those of the routes, for each of `LIBRARY_CALLS` that has its own."""
    runtime = dep.runtime
    if not runtime.has_library_latency:
        return network.latencies()
    of_call = {None: 0.0, "send_recv": runtime.send_recv_latency_s, "all_to_all": runtime.all_to_all_latency_s}
    return [route_s + of_call[call] for call in LIBRARY_CALLS for route_s in network.latencies()]


def slowed(compute_s: Any, transfer_s: Any, slowdown: float) -> Any:
    """Return how long a compute takes that is slower by a fraction while a transfer runs beside it (s).

    Both begin together. While the transfer lasts the compute advances at 1 / (1 + slowdown) of its speed, afterwards
    at full speed; ``transfer_s`` is the transfer's time on a network of its own.
    """
    whole = compute_s * (1.0 + slowdown)
    return np.where(whole <= transfer_s, whole, compute_s + transfer_s * slowdown / (1.0 + slowdown))
