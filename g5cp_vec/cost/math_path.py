"""The closed form for cp = 1: sums of durations and of uncontended collectives, no simulation.

Equal to the event simulation where nothing overlaps (dense models on a switch). A collective step is priced as if
its flows met no others: ring steps at the narrowest link between neighbours, a direct exchange at the link that is
slowest to carry what the group puts on it. Experts are priced one op after another, so what a shared expert would hide
is exposed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.context import ALL_GATHER
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.cost.fixed import fixed_seconds
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.rows import duration_seconds, parts_by_key
from g5cp_vec.cost.wires import Wire, wire
from g5cp_vec.mapping.load import Count, Load
from g5cp_vec.mapping.network import Network
from g5cp_vec.mapping.ranks import expert_groups, groups_along, rank_chips
from g5cp_vec.mapping.structure import stage_layers

Seconds = NDArray[np.float64]


class MathTimes(NamedTuple):
    """Times and traffic by closed form; arrays of shape (n_points,), bytes sent by the rank that sends most."""

    step_s: Seconds
    compute_s: Seconds
    attention_s: Seconds
    overhead_s: Seconds
    comm_s: Seconds
    tp_bytes: Count
    ep_bytes: Count
    pp_bytes: Count


class _Hop(NamedTuple):
    """Latency (s) and bandwidth (bytes/s) of the slowest route of a set, on its own."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, message: Wire) -> Seconds:
        start_s = self.latency_s if message.start_s is None else message.start_s
        result: Seconds = start_s + message.wire_bytes / self.bytes_per_s
        return result


def _slowest(network: Network, src: NDArray[np.int32], dst: NDArray[np.int32]) -> _Hop:
    routes = network.routes(np.ravel(src), np.ravel(dst))
    capacity = np.asarray(network.capacities())[network.link_capacity]
    latency = np.asarray(network.latencies())
    return _Hop(float(latency[routes.latency].max()), float(capacity[routes.links].min()))


def _ring_hop(network: Network, groups: NDArray[np.int32]) -> _Hop:
    return _slowest(network, groups, np.roll(groups, -1, axis=1))


def math_times(dep: Deployment, network: Network, load: Load, n_points: int) -> MathTimes:
    """Return the closed form of a deployment with cp = 1 at each point of a load."""
    assert dep.cp == 1
    parts = parts_by_key(dep, load)
    seconds = {key: duration_seconds(dep, load, parts, key) for key in parts}
    fixed = {key: fixed_seconds(dep, load, parts[key], key) for key in parts}
    kinds, sequence = dep.model.kinds
    ranks = rank_chips({"dp": dep.dp, "pp": dep.pp, "cp": 1, "tp": dep.tp}, dep.rank_order)
    ranges = stage_layers(dep.model.n_layers, dep.pp)
    last = dep.pp - 1
    step, comm = np.zeros(n_points), np.zeros(n_points)
    own, attention, overhead = np.zeros(n_points), np.zeros(n_points), np.zeros(n_points)
    sent_tp, sent_ep = 0 * load.rank_tokens, 0 * load.rank_tokens
    for stage, layers in enumerate(ranges):
        stage_tp, stage_ep = 0 * load.rank_tokens, 0 * load.rank_tokens
        for layer in layers:
            kind = sequence[layer]
            computed = sum(value for key, value in seconds.items() if key[1] == kind)
            tp_s, tp_bytes = _tp_all_reduces(dep, network, load, kinds, kinds[kind], ranks[:, stage])
            ep_s, ep_bytes = _expert_traffic(dep, network, load, kinds, kinds[kind], ranks[:, stage])
            step += computed + tp_s + ep_s
            stage_tp, stage_ep = stage_tp + tp_bytes, stage_ep + ep_bytes
            if stage == last:
                own += computed
                attention += seconds.get(("attention", kind), 0.0)
                comm += tp_s + ep_s
                overhead += sum(value for key, value in fixed.items() if key[1] == kind)
        sent_tp, sent_ep = np.maximum(sent_tp, stage_tp), np.maximum(sent_ep, stage_ep)
    step += seconds[("embed", None)] + seconds[("lm_head", None)]
    own += seconds[("lm_head", None)] + (seconds[("embed", None)] if dep.pp == 1 else 0.0)
    overhead += fixed[("lm_head", None)] + (fixed[("embed", None)] if dep.pp == 1 else 0.0)
    sent_pp = 0 * load.rank_tokens
    for stage in range(1, dep.pp):
        sent_pp = message_bytes(dep, load, kinds, "pp")
        hop = _slowest(network, ranks[:, stage - 1], ranks[:, stage])
        hop_s = hop.seconds(wire(dep, network, "pp", sent_pp))
        step += hop_s
        if stage == last:
            comm += hop_s
    return MathTimes(step, own, attention, overhead, comm, sent_tp, sent_ep, sent_pp)


def _tp_all_reduces(
    dep: Deployment, network: Network, load: Load, kinds: list[LayerKind], kind: LayerKind, ranks: NDArray[np.int32]
) -> tuple[Count, Count]:
    """Seconds and bytes per rank of a layer's all-reduces: one after its attention, one after its network."""
    if dep.tp == 1:
        return 0.0, 0
    chunk = message_bytes(dep, load, kinds, "tp_chunk")
    n_halves = 2 * ((kind.attention is not None) + (kind.ffn != "none"))
    on_wire = wire(dep, network, "tp_chunk", chunk)
    return _halves(dep, "tp", network, groups_along(ranks, 2), chunk, on_wire, n_halves)


def _halves(
    dep: Deployment, group: str, network: Network, groups: NDArray[np.int32], chunk: Count, on_wire: Wire, n_halves: int
) -> tuple[Count, Count]:
    """Seconds and bytes per rank of reduce-scatters and all-gathers over groups."""
    size = groups.shape[1]
    if dep.algorithm(group) == "ring":
        seconds = n_halves * (size - 1) * _ring_hop(network, groups).seconds(on_wire)
    else:
        seconds = n_halves * _all_to_all(network, groups, on_wire)
    return seconds, n_halves * (size - 1) * chunk


def _all_to_all(network: Network, groups: NDArray[np.int32], message: Wire) -> Seconds:
    """Everyone to everyone at once: as long as the busiest link of a group takes for all its messages."""
    n_groups, size = groups.shape
    src = np.repeat(groups, size, axis=1)
    dst = np.tile(groups, (1, size))
    apart = src != dst
    routes = network.routes(src[apart], dst[apart])
    group = np.repeat(np.repeat(np.arange(n_groups), size * (size - 1)), np.diff(routes.indptr))
    crossed, n_messages = np.unique(group * network.n_links + routes.links, return_counts=True)
    capacity = np.asarray(network.capacities())[network.link_capacity[crossed % network.n_links]]
    latency_s = np.asarray(network.latencies())[routes.latency].max()
    start_s = latency_s if message.start_s is None else message.start_s
    seconds: Seconds = start_s + message.wire_bytes * (n_messages / capacity).max()
    return seconds


def _expert_traffic(
    dep: Deployment, network: Network, load: Load, kinds: list[LayerKind], kind: LayerKind, ranks: NDArray[np.int32]
) -> tuple[Count, Count]:
    """Seconds and bytes per rank of a layer's dispatch and combine, with the gathering over replicas."""
    if kind.ffn != "moe":
        return 0.0, 0
    assert dep.ep is not None
    assert dep.moe_tp is not None
    seconds: Count = 0.0
    sent: Count = 0
    if dep.moe_dispatch == ALL_GATHER:
        if dep.replicas == 1:
            return 0.0, 0
        for key in ("moe_hidden", ("moe_logits", kinds.index(kind)), "moe_sums"):
            message = message_bytes(dep, load, kinds, key)
            on_wire = wire(dep, network, key, message)
            took_s, n_bytes = _halves(dep, "ep", network, groups_along(ranks, 0), message, on_wire, 1)
            seconds, sent = seconds + took_s, sent + n_bytes
        return seconds, sent
    ep_groups, moe_tp_groups = expert_groups(ranks, dep.ep)
    if dep.ep > 1:
        message = message_bytes(dep, load, kinds, "ep_dispatch")
        seconds = seconds + 2 * _all_to_all(network, ep_groups, wire(dep, network, "ep_dispatch", message))
        sent = sent + 2 * (dep.ep - 1) * message
    if dep.moe_tp > dep.tp:
        message = message_bytes(dep, load, kinds, "ep_gather")
        on_wire = wire(dep, network, "ep_gather", message)
        gather_s, gathered = _halves(dep, "ep", network, moe_tp_groups, message, on_wire, 2)
        seconds, sent = seconds + gather_s, sent + gathered
    return seconds, sent
