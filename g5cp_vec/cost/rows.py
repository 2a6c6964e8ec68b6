"""Rows of costs: what the ids of a structure amount to at each point of a deployment."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.flops import edge_parts, layer_parts
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.parts import OpParts, Part
from g5cp_vec.cost.roofline import op_seconds
from g5cp_vec.mapping.graph import ComputeKey, CostKeys, split_rate
from g5cp_vec.mapping.load import Load
from g5cp_vec.mapping.network import Network


class CostRows(NamedTuple):
    """Costs of several points of one structure.

    Attributes
    ----------
    duration_s : ndarray of float64, shape (n_points, n_duration_ids)
    bytes : ndarray of int64, shape (n_points, n_bytes_ids)
    latency_s : ndarray of float64, shape (n_points, n_latency_ids)
    capacity : ndarray of float64, shape (n_points, n_capacity_ids)
    """

    duration_s: NDArray[np.float64]
    bytes: NDArray[np.int64]
    latency_s: NDArray[np.float64]
    capacity: NDArray[np.float64]


def parts_by_key(dep: Deployment, load: Load) -> dict[ComputeKey, list[Part]]:
    """Return the parts of every compute op of a deployment by what it does."""
    kinds, _ = dep.model.kinds
    parts: dict[ComputeKey, list[Part]] = {(name, None): value for name, value in edge_parts(dep, load).items()}
    for index, kind in enumerate(kinds):
        layer: OpParts = layer_parts(dep, load, kind)
        parts |= {(name, index): value for name, value in layer.items()}
    return parts


def cost_rows(dep: Deployment, keys: CostKeys, network: Network, load: Load, n_points: int) -> CostRows:
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
    """
    parts = parts_by_key(dep, load)
    kinds, _ = dep.model.kinds
    rates = network.rates()
    duration_s = np.empty((n_points, len(keys.durations)))
    for key, column in keys.durations.items():
        computed, rate = split_rate(key)
        duration_s[:, column] = op_seconds(dep, parts[computed]) / rates[rate]
    # One column even without flows: a matrix product over no columns would lose the shape.
    bytes_ = np.zeros((n_points, max(len(keys.bytes), 1)), np.int64)
    for message, column in keys.bytes.items():
        bytes_[:, column] = message_bytes(dep, load, kinds, message)
    latency_s = np.tile(np.asarray(network.latencies(), float), (n_points, 1))
    capacity = np.tile(np.asarray(network.capacities(), float), (n_points, 1))
    return CostRows(duration_s, bytes_, latency_s, capacity)
