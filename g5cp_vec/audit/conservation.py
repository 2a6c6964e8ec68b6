"""The six conservation KPIs of one simulated deployment; all are 0 when nothing was lost, early or too fast.

Promises come from closed forms over the whole deployment, deeds from the recorded start and end of every operation
of the full (unfolded) graph. Not audited: how long a compute op took, and which of several ready ones a chip chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.audit.promises import promised_flops, promised_tokens, promised_traffic
from g5cp_vec.audit.ring import lost_kv_blocks
from g5cp_vec.audit.sharing import INSTANT_RTOL, Flows, capacity_violations, select_rows
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.flops import edge_parts, layer_parts
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.parts import Part
from g5cp_vec.cost.wires import transfer_latencies, wire
from g5cp_vec.mapping.graph import MessageKey, OpGraph, split_rate
from g5cp_vec.mapping.load import Load, build_load
from g5cp_vec.mapping.network import build_network
from g5cp_vec.mapping.structure import Structure

Array = NDArray[Any]
Mask = NDArray[np.bool_]


class Kpis(NamedTuple):
    """Conservation KPIs (unbounded integers).

    Attributes
    ----------
    lost_ops : int
        Ops of the graph that did not run exactly once.
    lost_bytes : int
        Sum over pairs of chips of |promised - moved by flows that ended|.
    lost_kv_blocks : int
        Over layers and ranks, the blocks of the ring that were not received exactly once.
    lost_flops : int
        Sum over FLOP classes of |promised - those of the ops that ran|.
    order_violations : int
        Ops that started before a predecessor ended or while their chip was busy, or ended before they started.
    capacity_violations : int
        Flows that moved more or less than their fair share, and (link, interval) pairs asked for more than there is.
    """

    lost_ops: int
    lost_bytes: int
    lost_kv_blocks: int
    lost_flops: int
    order_violations: int
    capacity_violations: int


def audit(
    dep: Deployment,
    structure: Structure,
    seq_len: int,
    batch: int,
    cached_tokens: int,
    start_s: Array,
    finish_s: Array,
    ran: Array | None = None,
) -> Kpis:
    """Audit one simulation.

    Parameters
    ----------
    dep : Deployment
        Gives the promises, and bandwidths and latencies of the links.
    structure : Structure
        Of ``dep``, or of a deployment that shares its structure.
    seq_len, batch, cached_tokens : int
        Load of the simulation.
    start_s, finish_s : ndarrays of float64, shape (n_ops,)
        Recorded times; NaN where there is none.
    ran : ndarray of int, shape (n_ops,), optional
        How often each op ran; once where it has times, when absent.

    Returns
    -------
    kpis : Kpis
    """
    seq_len, batch, cached_tokens = int(seq_len), int(batch), int(cached_tokens)
    ops, graph = structure.ops, structure.ops.graph
    once = np.isfinite(start_s) & np.isfinite(finish_s)
    if ran is not None:
        once &= np.asarray(ran) == 1
    pred = np.repeat(np.arange(len(once)), np.diff(graph.succ_indptr))
    succ = graph.succ_indices
    tokens = promised_tokens(dep, seq_len, batch, cached_tokens)
    load = build_load(dep, seq_len, batch, cached_tokens)
    kinds = dep.model.kinds[0]
    n_bytes = [int(message_bytes(dep, load, kinds, key)) for key in _messages(structure)]
    is_flow = graph.op_chip < 0
    sent = np.flatnonzero(once & is_flow)

    moved = [(np.array(t.src) * dep.n_chips + t.dst, t.n_bytes) for t in promised_traffic(dep, tokens)]
    pair = ops.op_src[sent].astype(np.int64) * dep.n_chips + ops.op_dst[sent]
    moved += [(pair[graph.op_cost[sent] == i], -n) for i, n in enumerate(n_bytes)]

    flops = promised_flops(dep, tokens)
    n_runs = np.bincount(graph.op_cost[once & ~is_flow], minlength=len(structure.keys.durations))
    for parts, n in zip(_parts_by_id(dep, load, structure), n_runs.tolist(), strict=True):
        for part in parts:
            flops[part.flop_class] = flops.get(part.flop_class, 0) - n * int(part.flops)

    return Kpis(
        lost_ops=int(np.count_nonzero(~once)),
        lost_bytes=_imbalance(moved),
        lost_kv_blocks=lost_kv_blocks(dep, ops, pred, succ, once),
        lost_flops=sum(abs(difference) for difference in flops.values()),
        order_violations=int(np.count_nonzero(_out_of_order(ops, pred, succ, start_s, finish_s, once))),
        capacity_violations=_capacity_violations(dep, structure, n_bytes, start_s, finish_s, sent),
    )


def _messages(structure: Structure) -> list[MessageKey]:
    """Return the keys of the messages in the order of their ids."""
    return sorted(structure.keys.bytes, key=structure.keys.bytes.__getitem__)


def _imbalance(moved: Sequence[tuple[Array, int]]) -> int:
    """Sum over pairs of chips of |sum of the amounts| that were booked to them."""
    codes = np.concatenate([np.zeros(0, np.int64), *(pairs for pairs, _ in moved)])
    # Far from any deployment, but a silent overflow would be a wrong verdict.
    fits = sum(len(pairs) * abs(amount) for pairs, amount in moved) < 2**63
    pairs, place = np.unique(codes, return_inverse=True)
    balance = np.zeros(len(pairs), np.int64 if fits else object)
    at = 0
    for booked, amount in moved:
        # Unbounded integers where int64 does not do: NumPy adds objects with Python's +.
        np.add.at(balance, place[at : at + len(booked)], amount)
        at += len(booked)
    return int(np.abs(balance).sum())


def _parts_by_id(dep: Deployment, load: Load, structure: Structure) -> list[list[Part]]:
    """Return the parts of the compute ops of each duration id, with exact counts."""
    edges = edge_parts(dep, load)
    layers = [layer_parts(dep, load, kind) for kind in dep.model.kinds[0]]
    parts: list[list[Part]] = [[] for _ in structure.keys.durations]
    for key, i in structure.keys.durations.items():
        (name, kind), _ = split_rate(key)  # a slower chip does the same
        of_name = edges if kind is None else layers[kind]
        # Beside a transfer a ring step does the same, only slower; a host step computes nothing.
        parts[i] = of_name.get(name.removeprefix("slowed_"), [])
    return parts


def _out_of_order(ops: OpGraph, pred: Array, succ: Array, start_s: Array, finish_s: Array, once: Mask) -> Mask:
    """Return which ops started too early or ended before they started; one instant is allowed."""
    ready_s = finish_s * (1 - INSTANT_RTOL)
    early = once & (finish_s < start_s * (1 - INSTANT_RTOL))
    # NaN compares false: who waits for an op that never ended has started before its end.
    too_soon = once[succ] & ~(once[pred] & (start_s[succ] >= ready_s[pred]))
    early[succ[too_soon]] = True
    # Computes of a chip by start: none may start before the latest end so far. The latest is found among the ranks of
    # the ends, shifted by chip so that one running maximum serves all chips without rounding.
    computes = np.flatnonzero(once & (ops.graph.op_chip >= 0))
    chip = ops.graph.op_chip[computes].astype(np.int64)
    order = np.lexsort((finish_s[computes], start_s[computes], chip))
    computes, chip = computes[order], chip[order]
    ends, rank = np.unique(finish_s[computes], return_inverse=True)
    latest = np.maximum.accumulate(chip * len(ends) + rank)
    same_chip = chip[1:] == chip[:-1]
    busy_until_s = ends[(latest - chip * len(ends))[:-1]] if len(ends) else ends
    overlaps = same_chip & (start_s[computes[1:]] < busy_until_s * (1 - INSTANT_RTOL))
    early[computes[1:][overlaps]] = True
    return early


def _capacity_violations(
    dep: Deployment, structure: Structure, n_bytes: list[int], start_s: Array, finish_s: Array, sent: Array
) -> int:
    graph = structure.ops.graph
    # The structure may have been built for a machine with other bandwidths.
    network = build_network(dep.topology, dep.n_chips)
    # Links are occupied by what the library makes of a message.
    wires = {key: wire(dep, network, key, n) for key, n in zip(_messages(structure), n_bytes, strict=True)}
    (latency_s,) = transfer_latencies(dep, network, structure.keys, {k: w.start_s for k, w in wires.items()}, 1)
    amount = np.array([*(float(w.wire_bytes) for w in wires.values()), 0])[graph.op_cost[sent]]
    length = graph.route_indptr[sent + 1] - graph.route_indptr[sent]
    moving = sent[(amount > 0) & (length > 0)]
    owner, links = select_rows(graph.route_indptr, graph.route_indices, moving)
    flows = Flows(
        route_indptr=np.searchsorted(owner, np.arange(len(moving) + 1)),
        route_links=links,
        bytes=amount[(amount > 0) & (length > 0)],
        active_s=start_s[moving] + latency_s[graph.op_latency[moving]],
        finish_s=finish_s[moving],
    )
    capacity = np.array(network.capacities(), np.float64)[graph.link_capacity]
    return capacity_violations(flows, capacity, finish_s[np.isfinite(finish_s)])
