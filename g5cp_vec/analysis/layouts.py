"""Which chip holds which rank and which shard of a cache, and the groups that ranks form; legal layouts of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.context import kv_shards, legal_layouts, mixers_of
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.model import Model
from g5cp_vec.mapping.ranks import expert_groups, groups_along, rank_chips
from g5cp_vec.mapping.sharding import Groups, shard_numbers


class RankRow(NamedTuple):
    """One chip: its rank's coordinates and the shard of the cache that it holds."""

    chip: int
    dp: int
    pp: int
    pcp: int
    tp: int
    kv_shard: int


def layout_key(dep: Deployment) -> tuple[object, ...]:
    """Return what decides where ranks and groups of a deployment are."""
    return (dep.dp, dep.pp, dep.cp, dep.pcp, dep.tp, dep.dcp, dep.cp_semantics, dep.ep, dep.rank_order)


def rank_rows(dep: Deployment) -> list[RankRow]:
    """Return the rank of every chip, in the order of chips."""
    chips = _chips(dep)
    shards = shard_numbers(dep.dcp_group, dep.cp_semantics, dep.sequence_ranks, dep.tp, dep.dcp)
    rows = [
        RankRow(int(chip), dp, pp, pcp, tp, int(shards[pcp, tp])) for (dp, pp, pcp, tp), chip in np.ndenumerate(chips)
    ]
    return sorted(rows)


def rank_groups(dep: Deployment) -> dict[str, list[list[int]]]:
    """Return the chips of every group of more than one, by what the group is for."""
    chips = _chips(dep)
    found: dict[str, list[list[int]]] = {}

    def add(name: str, groups: Iterable[NDArray[np.int32]]) -> None:
        members = [group.tolist() for group in groups if len(group) > 1]
        if members:
            found[name] = members

    stages = [chips[:, stage] for stage in range(dep.pp)]
    add("tp", groups_along(chips, 3))
    if dep.is_sharded:
        add("pcp", groups_along(chips, 2))
        dcp = Groups(dep.dcp_group, dep.dcp)
        add("dcp", [group for stage in stages for group in dcp.split(stage)])
    else:
        add("cp", groups_along(chips, 2))
    add("pp", groups_along(chips, 1))
    if dep.ep is not None:
        pooled = [stage.reshape(-1, 1, dep.tp) if dep.pcp > 1 else stage for stage in stages]
        add("ep", [group for ranks in pooled for group in expert_groups(ranks, dep.ep or 1)[0]])
    return found


def _chips(dep: Deployment) -> NDArray[np.int32]:
    return rank_chips({"dp": dep.dp, "pp": dep.pp, "cp": dep.sequence_ranks, "tp": dep.tp}, dep.rank_order)


def legal_rows(model: Model, n_chips: int, semantics: str) -> list[tuple[int, int, int, int]]:
    """Return every legal (tp, pcp, dcp) of a model on so many chips, and the shards of its cache."""
    layouts = legal_layouts(mixers_of(model), n_chips, semantics)
    return [(tp, pcp, dcp, kv_shards(pcp, dcp, semantics)) for tp, pcp, dcp in layouts]
