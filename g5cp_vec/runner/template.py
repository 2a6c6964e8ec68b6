"""A structure made ready to run: the engine's arrays, what each op's role is, and which bytes each rank and link sees.

Traffic needs no simulation: how many messages of each kind a rank sends is part of the structure, so the bytes of
every point are one integer matrix product away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine.arrays import COMPUTE, FLOW
from g5cp_vec.engine.measure import ROLE_ATTENTION, ROLE_RING_FIRST, ROLE_RING_FLOW, ROLE_RING_LAST, ROLE_RING_STEP
from g5cp_vec.mapping.graph import REASON, OpGraph
from g5cp_vec.mapping.structure import Structure

# Column of the results -> (reason of the flows, which end of a flow owns them).
TRAFFIC = {
    "passkv_bytes": ("cp_pass_kv", "src"),
    "passq_query_bytes": ("cp_pass_q", "dst"),
    "passq_reduce_bytes": ("cp_reduce", "src"),
    "tp_bytes": ("tp", "src"),
    "ep_bytes": ("ep", "src"),
    "pp_bytes": ("pp", "src"),
}


@dataclass(frozen=True, slots=True)
class LinkLoads:
    """Distinct loads of links: ``messages[i]`` of each bytes id cross link ``link[i]``, whose capacity id is given.

    Links with equal loads and capacity are listed once, by the lowest; rows ascend by link.
    """

    link: NDArray[np.int64]
    capacity: NDArray[np.int32]
    messages: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Template:
    """A structure, and what is derived from it once for all points that share it.

    Attributes
    ----------
    structure : Structure
    op_role : ndarray of int8, shape (n_ops,)
    sent : dict
        For each column of `TRAFFIC`: distinct rows of messages per bytes id over ranks, shape (n_distinct, n_ids).
    loads : LinkLoads
    """

    structure: Structure
    op_role: NDArray[np.int8]
    sent: dict[str, NDArray[np.int64]]
    loads: LinkLoads


def build_template(structure: Structure) -> Template:
    """Derive what every point of a structure needs."""
    ops = structure.ops
    n_ids = max(len(structure.keys.bytes), 1)
    sent = {column: _messages_per_rank(ops, n_ids, reason, end) for column, (reason, end) in TRAFFIC.items()}
    return Template(structure, _roles(ops), sent, _link_loads(structure, n_ids))


def _roles(ops: OpGraph) -> NDArray[np.int8]:
    role = np.zeros(len(ops.op_reason), np.int8)
    compute = ops.graph.op_kind == COMPUTE
    attention = compute & (ops.op_reason == REASON["attention"])
    role[attention] |= ROLE_ATTENTION
    ring_flow = ops.op_reason == REASON["cp_pass_kv"]
    role[ring_flow] |= ROLE_RING_FLOW
    if ring_flow.any():
        last = int(ops.op_step[attention].max())
        role[attention] |= ROLE_RING_STEP
        role[attention & (ops.op_step == 0)] |= ROLE_RING_FIRST
        role[attention & (ops.op_step == last)] |= ROLE_RING_LAST
    return role


def _messages_per_rank(ops: OpGraph, n_ids: int, reason: str, end: str) -> NDArray[np.int64]:
    chosen = (ops.graph.op_kind == FLOW) & (ops.op_reason == REASON[reason])
    chips = (ops.op_src if end == "src" else ops.op_dst)[chosen].astype(np.int64)
    per_rank = np.bincount(chips * n_ids + ops.graph.op_cost[chosen], minlength=ops.n_chips * n_ids)
    return np.unique(per_rank.reshape(ops.n_chips, n_ids), axis=0)


def _link_loads(structure: Structure, n_ids: int) -> LinkLoads:
    graph, n_links = structure.ops.graph, structure.network.n_links
    entry = graph.route_indices.astype(np.int64) * n_ids + graph.op_cost[graph.route_op]
    messages = np.bincount(entry, minlength=n_links * n_ids).reshape(n_links, n_ids)
    keyed = np.column_stack([graph.link_capacity, messages])
    _, first = np.unique(keyed, axis=0, return_index=True)
    first.sort()
    return LinkLoads(first, graph.link_capacity[first], messages[first])


def most_sent(template: Template, column: str, message_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of a traffic column for every point: what the rank that sends most sends.

    Parameters
    ----------
    template : Template
    column : str
        A key of `TRAFFIC`.
    message_bytes : ndarray of int64, shape (n_points, n_ids)
    """
    result: NDArray[np.int64] = (message_bytes @ template.sent[column].T).max(axis=1)
    return result


def busiest_link(
    template: Template, message_bytes: NDArray[np.int64], capacity: NDArray[np.float64], step_s: NDArray[np.float64]
) -> tuple[list[Any], NDArray[np.float64]]:
    """Name and utilisation (bytes / (capacity * step)) of the most used link of every point; None without traffic."""
    loads = template.loads
    if len(loads.link) == 0:
        return [None] * len(step_s), np.full(len(step_s), np.nan)
    use = (message_bytes @ loads.messages.T) / (capacity[:, loads.capacity] * step_s[:, None])
    worst = use.argmax(axis=1)
    value = use[np.arange(len(use)), worst]
    names = [structure_name(template, int(loads.link[i])) for i in range(len(loads.link))]
    return [names[i] if v > 0 else None for i, v in zip(worst, value, strict=True)], np.where(value > 0, value, np.nan)


def structure_name(template: Template, link: int) -> str:
    """Name of a link."""
    return template.structure.network.link_name(link)
