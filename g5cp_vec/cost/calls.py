"""The collectives that messages belong to: what a library would be called for, over which ranks, in how many steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.collectives import GROUPS
from g5cp_vec.config.context import SEMANTICS
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.mapping.keys import MessageKey
from g5cp_vec.mapping.ranks import expert_groups, groups_along, rank_chips
from g5cp_vec.mapping.sharding import Groups

# Operation and axis of messages of collectives by their names, and of all others by how a name begins.
_CALLS = {
    "tp_chunk": ("all_reduce", "tp"),
    "cp_reduce_ring": ("alltoall", "cp"),
    "cp_keys": ("all_gather", "cp"),
    "cp_latents": ("all_gather", "cp"),
    "cp_states": ("all_gather", "cp"),
    "ep_dispatch": ("alltoall", "ep"),
    "ep_combine": ("alltoall", "ep"),
    "moe_hidden": ("all_gather", "replicas"),
    "moe_logits": ("all_gather", "replicas"),
    "moe_sums": ("reduce_scatter", "replicas"),
    "dcp_q": ("all_gather", "query"),
    "dcp_a2a": ("alltoall", "dcp"),
    "dcp_out": ("reduce_scatter", "dcp"),
}
# Over the ranks that split new tokens: a pcp group, or a cp group; and over dcp groups.
_OF_PREFIX = {"pcp_": ("all_gather", "pcp"), "dcp_": ("all_gather", "dcp")}
# All-to-alls that every member sends at once, whatever the algorithm.
_AT_ONCE = ("cp_reduce_ring", "ep_dispatch", "ep_combine")
# No table has it: gathering over the ranks that split an expert. But there is a choice of algorithms.
_UNTABLED = {"ep_gather": "ep"}
_GROUP = {"replicas": "ep", "query": "dcp"}


class Call(NamedTuple):
    """A collective that a message is part of.

    Attributes
    ----------
    op : str
        As the tables of measurements name it.
    axis : {"tp", "cp", "ep", "pcp", "dcp", "query", "replicas"}
        Groups that take part.
    size : int
    n_steps : int
        Steps that follow one another.
    n_at_once : int
        Messages that a port carries in a step.
    """

    op: str
    axis: str
    size: int
    n_steps: int
    n_at_once: int


def name_of(key: MessageKey) -> str:
    """Return the name of a message, without the index of a layer kind and whose it is."""
    return (key if isinstance(key, str) else key[0]).partition("@")[0]


def is_collective(key: MessageKey) -> bool:
    """Whether a message belongs to a collective, not to a transfer from one rank to another."""
    name = name_of(key)
    return _called(name) is not None or name in _UNTABLED or name.startswith("tp_")


def _called(name: str) -> tuple[str, str] | None:
    return _CALLS.get(name) or _OF_PREFIX.get(name[:4])


def call_of(dep: Deployment, key: MessageKey) -> Call | None:
    """Return the collective that a message belongs to; None for a transfer, or one that no table has."""
    name = name_of(key)
    found = _called(name)
    if found is None:
        return None
    op, axis = found
    if name == "dcp_out" and dep.dcp_group != "tp":
        op = "all_reduce"
    if name == "dcp_lse" and _sends_sums_apart(dep, key):
        op = "alltoall"
    size = _size(dep, axis)
    is_direct = name in _AT_ONCE or dep.algorithm(_group(dep, name) or "") == "direct"
    steps, at_once = (1, size - 1) if is_direct else (size - 1, 1)
    return Call(op, axis, size, steps * (2 if op == "all_reduce" else 1), at_once)


def open_groups(dep: Deployment, keys: Iterable[MessageKey]) -> tuple[str, ...]:
    """Return the kinds of groups whose collectives the choice of an algorithm changes, of those that messages name."""
    found = {_group(dep, name) for name in map(name_of, keys) if name not in _AT_ONCE}
    return tuple(group for group in GROUPS if group in found)


def groups_of(dep: Deployment, axis: str) -> NDArray[np.int32]:
    """Return the chips of the groups along an axis, shape (n_groups, size)."""
    degrees = {"dp": dep.dp, "pp": dep.pp, "cp": dep.sequence_ranks, "tp": dep.tp}
    ranks = rank_chips(degrees, dep.rank_order)
    return np.concatenate([_of_stage(dep, axis, ranks[:, stage]) for stage in range(dep.pp)])


def _group(dep: Deployment, name: str) -> str | None:
    """Return the kind of group of a message, as algorithms are chosen for them; None where there is no choice."""
    found = _called(name)
    axis = found[1] if found is not None else _UNTABLED.get(name)
    group = _GROUP.get(axis, axis) if axis is not None else None
    return "cp" if dep.cp > 1 and group in ("pcp", "dcp") else group


def _sends_sums_apart(dep: Deployment, key: MessageKey) -> bool:
    """Whether log-sum-exps travel in an exchange of their own: those of sparse attention in vllm-ascend."""
    if isinstance(key, str) or dep.cp_semantics != SEMANTICS[0]:
        return False
    a = dep.model.kinds[0][key[1]].softmax
    return a is not None and a.span == "sparse"


def _size(dep: Deployment, axis: str) -> int:
    if axis == "query":
        return {"tp": dep.dcp, "pcp": 1, "all": dep.tp}[dep.dcp_group]
    sizes = {"tp": dep.tp, "cp": dep.cp, "pcp": dep.sequence_ranks, "dcp": dep.dcp, "replicas": dep.replicas}
    return (dep.ep or 1) if axis == "ep" else sizes[axis]


def _of_stage(dep: Deployment, axis: str, ranks: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the groups of one stage; ``ranks`` has shape (dp, P, tp)."""
    # As experts see them, ranks of different pcp coordinate are replicas.
    pool = ranks.reshape(-1, 1, dep.tp) if dep.pcp > 1 else ranks
    if axis == "ep":
        assert dep.ep is not None
        return expert_groups(pool, dep.ep)[0]
    if axis == "replicas":
        return groups_along(pool, 0)
    if axis in ("dcp", "query"):
        which = "tp" if axis == "query" else dep.dcp_group
        return Groups(which, _size(dep, axis)).split(ranks)
    return groups_along(ranks, 2 if axis == "tp" else 1)
