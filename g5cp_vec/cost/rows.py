"""Rows of costs: what the ids of a structure amount to at each point of a deployment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.calibration import price_part, price_parts
from g5cp_vec.cost.fixed import extra_seconds, kernels, slowed
from g5cp_vec.cost.flops import edge_parts, layer_parts
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.parts import OpParts, Part
from g5cp_vec.cost.roofline import op_overhead_s, op_seconds
from g5cp_vec.cost.wires import transfer_latencies, wire
from g5cp_vec.mapping.graph import ComputeKey, CostKeys, MessageKey, split_rate
from g5cp_vec.mapping.load import Load
from g5cp_vec.mapping.network import Network
from g5cp_vec.mapping.ranks import rank_chips


class CostRows(NamedTuple):
    """Costs of several points of one structure.

    Attributes
    ----------
    duration_s : ndarray of float64, shape (n_points, n_duration_ids)
    bytes : ndarray of int64, shape (n_points, n_bytes_ids)
    latency_s : ndarray of float64, shape (n_points, n_latency_ids)
    capacity : ndarray of float64, shape (n_points, n_capacity_ids)
    wire_bytes : ndarray of float64, shape (n_points, n_bytes_ids)
        What the messages occupy on their links; see `g5cp_vec.cost.wires`.
    """

    duration_s: NDArray[np.float64]
    bytes: NDArray[np.int64]
    latency_s: NDArray[np.float64]
    capacity: NDArray[np.float64]
    wire_bytes: NDArray[np.float64]


Parts = dict[ComputeKey, list[Part]]


def parts_by_key(dep: Deployment, load: Load) -> Parts:
    """Return the parts of every compute op of a deployment by what it does."""
    kinds, _ = dep.model.kinds
    parts: Parts = {(name, None): value for name, value in edge_parts(dep, load).items()}
    for index, kind in enumerate(kinds):
        layer: OpParts = layer_parts(dep, load, kind)
        parts |= {(name, index): value for name, value in layer.items()}
    return parts


def occurring(keys: CostKeys, parts: Parts) -> Parts:
    """Return the parts of the ops that a structure with ``keys`` has."""
    computed = {split_rate(key)[0] for key in keys.durations}
    return {
        (name, kind): of_op
        for (name, kind), of_op in parts.items()
        if (name, kind) in computed or (f"slowed_{name}", kind) in computed
    }


def duration_seconds(dep: Deployment, load: Load, parts: Parts, key: ComputeKey) -> Any:
    """Return the duration of one compute op at full speed: its work, plus what is fixed (s).

    A host step is no work, so it has no parts.
    """
    return op_seconds(dep, parts.get(key, [])) + extra_seconds(dep, load, parts.get(key, []), key)


def host_seconds(dep: Deployment, load: Load) -> float:
    """Return what the host of a rank takes to launch a pass (s): its kernels, and a call for each all-reduce."""
    kinds, sequence = dep.model.kinds
    n_kernels: Counter[int | None] = Counter()
    for key, parts in parts_by_key(dep, load).items():
        n_kernels[key[1]] += kernels(dep, parts, key)
    calls = [(kind.attention is not None) + (kind.ffn != "none") if dep.tp > 1 else 0 for kind in kinds]
    n_launches = n_kernels[None] + sum(n_kernels[index] + calls[index] for index in sequence)
    return dep.runtime.host_launch_s * n_launches


class Coverage(NamedTuple):
    """How far the chip's calibration carries the points of a deployment.

    Attributes
    ----------
    uncalibrated : tuple of str
        Compute ops with a part that nothing was measured for, sorted.
    extrapolated : ndarray of float64, shape (n_points,)
        Largest ratio by which a size of an op lies outside the measured ones, 1 inside, over the ops that take at least
        ``SMALL_SHARE`` of one layer of each kind and the edges together.
    """

    uncalibrated: tuple[str, ...]
    extrapolated: NDArray[np.float64]


# Shapes of parts that hardly matter (a router's few columns) are not worth a warning.
SMALL_SHARE = 0.01


def coverage(
    dep: Deployment, load: Load, n_points: int, keys: CostKeys | None = None, parts: Parts | None = None
) -> Coverage:
    """Say which ops of a deployment, those of a structure with ``keys``, are measured, and how far outside they are."""
    prices, uncalibrated = [], set()
    parts = parts_by_key(dep, load) if parts is None else parts
    # Not every op that has a price occurs at every load.
    for name, kind in parts if keys is None else occurring(keys, parts):
        for part in parts[name, kind]:
            price = price_part(dep.chip, dep.model.hidden, part, dep.runtime.kernels)
            if price is None:
                uncalibrated.add(name.partition("@")[0])
            else:
                prices.append(price)
    if not prices:
        return Coverage(tuple(sorted(uncalibrated)), np.ones(n_points))
    seconds, factors = np.empty((len(prices), n_points)), np.empty((len(prices), n_points))
    for row, price in enumerate(prices):
        seconds[row], factors[row] = price
    matters = seconds >= SMALL_SHARE * np.sum(seconds, axis=0)
    return Coverage(tuple(sorted(uncalibrated)), np.where(matters, factors, 1.0).max(axis=0))


class Computes(NamedTuple):
    """Compute ops of a deployment at full speed, by what they do; whatever the network.

    Attributes
    ----------
    work_s, extra_s : dict
        Work with the overhead of an op, and what an op costs beyond (s); numbers or arrays of shape (n_points,).
    covered : Coverage or None
        None where the chip is not calibrated.
    """

    work_s: dict[ComputeKey, Any]
    extra_s: dict[ComputeKey, Any]
    covered: Coverage | None


def price_computes(keys: CostKeys, loads: Sequence[tuple[Deployment, Load, int]]) -> list[Computes]:
    """Price the compute ops of a structure with ``keys`` for several deployments.

    Parameters
    ----------
    keys : CostKeys
    loads : sequence of (Deployment, Load, int)
        With so many points. Parts for one chip are priced together, as most of the time goes by the call.
    """
    asked = [(dep, load, n_points, occurring(keys, parts_by_key(dep, load))) for dep, load, n_points in loads]
    alike: dict[Any, tuple[Deployment, list[Part]]] = {}
    for dep, _, _, parts in asked:
        _, together = alike.setdefault((id(dep.chip), dep.model.hidden, dep.runtime.kernels), (dep, []))
        together += chain.from_iterable(parts.values())
    for dep, together in alike.values():
        price_parts(dep.chip, dep.model.hidden, together, dep.runtime.kernels)
    return [_computes(keys, *each) for each in asked]


def _computes(keys: CostKeys, dep: Deployment, load: Load, n_points: int, parts: Parts) -> Computes:
    ops = dict.fromkeys([*parts, *(split_rate(key)[0] for key in keys.durations)])
    return Computes(
        {key: op_seconds(dep, parts.get(key, [])) for key in ops},
        {key: extra_seconds(dep, load, parts.get(key, []), key) for key in ops},
        None if dep.chip.calibration is None else coverage(dep, load, n_points, keys, parts),
    )


def fixed_rows(
    dep: Deployment, keys: CostKeys, load: Load, n_points: int, computes: Computes | None = None
) -> NDArray[np.float64]:
    """Return the part of every duration that is no work, at full speed, shape (n_points, n_duration_ids)."""
    computes = computes or price_computes(keys, [(dep, load, n_points)])[0]
    seconds, overhead_s = np.empty((n_points, len(keys.durations))), op_overhead_s(dep)
    for key, column in keys.durations.items():
        seconds[:, column] = overhead_s + computes.extra_s[split_rate(key)[0]]
    return seconds


def cost_rows(
    dep: Deployment, keys: CostKeys, network: Network, load: Load, n_points: int, computes: Computes | None = None
) -> CostRows:
    """Price every op and message of a structure at each point.

    Parameters
    ----------
    dep : Deployment
    keys : CostKeys
        Of the structure.
    network : Network
        Of this deployment (its bandwidths, not only its shape).
    load : Load
        With arrays of shape (n_points,).
    n_points : int
    computes : Computes, optional
        What `price_computes` returns, where it is known already.
    """
    computes = computes or price_computes(keys, [(dep, load, n_points)])[0]
    kinds, _ = dep.model.kinds
    rates = network.rates()
    duration_s = np.empty((n_points, len(keys.durations)))
    for key, column in keys.durations.items():
        computed, rate = split_rate(key)
        if computed[0] == "slowed_ring_step":
            seconds = _slowed_ring_step(dep, network, load, computes, computed[1])
        else:
            seconds = computes.work_s[computed] + computes.extra_s[computed]
        duration_s[:, column] = seconds / rates[rate]
    # One column even without flows: a matrix product over no columns would lose the shape.
    bytes_ = np.zeros((n_points, max(len(keys.bytes), 1)), np.int64)
    wire_bytes = np.zeros(bytes_.shape)
    starts_s: dict[MessageKey, Any] = {}
    for message, column in keys.bytes.items():
        bytes_[:, column] = message_bytes(dep, load, kinds, message)
        wire_bytes[:, column], starts_s[message] = wire(dep, network, message, bytes_[:, column])
    latency_s = transfer_latencies(dep, network, keys, starts_s, n_points)
    capacity = np.tile(np.asarray(network.capacities(), float), (n_points, 1))
    return CostRows(duration_s, bytes_, latency_s, capacity, wire_bytes)


def _slowed_ring_step(dep: Deployment, network: Network, load: Load, computes: Computes, kind: int | None) -> Any:
    """Return the duration of a ring step beside which the next block travels, on links that nothing else uses (s)."""
    assert kind is not None
    kinds, _ = dep.model.kinds
    ranks = rank_chips({"dp": dep.dp, "pp": dep.pp, "cp": dep.sequence_ranks, "tp": dep.tp}, dep.rank_order)
    routes = network.routes(ranks.ravel(), np.roll(ranks, -1, axis=2).ravel())
    slowest = np.asarray(network.capacities())[network.link_capacity[routes.links]].min()
    key: MessageKey = ("cp_pass_kv", kind)
    block = wire(dep, network, key, message_bytes(dep, load, kinds, key)).wire_bytes
    overhead_s = op_overhead_s(dep)
    work_s = computes.work_s["ring_step", kind] - overhead_s
    return slowed(work_s, block / slowest, dep.runtime.overlap_slowdown) + overhead_s
