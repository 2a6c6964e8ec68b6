"""Collectives over the groups of deployed context parallelism, in the shape of a stage's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.collectives import algorithm_of
from g5cp_vec.mapping.all_to_all import all_to_all
from g5cp_vec.mapping.collectives import all_gather, all_reduce, distinct, reduce_scatter
from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Ids
from g5cp_vec.mapping.sharding import Groups, Reach, shard_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What decides the structure of sharded attention in every layer.

    Attributes
    ----------
    form : str
        ``prefill_form`` or ``decode_form``.
    semantics : {"multiplicative", "orthogonal"} or None
        None for a cp group.
    dcp : int
    dcp_group : {"tp", "pcp", "all"}
    contiguous : bool
        Whether pieces outside attention are contiguous.
    collective : str
        Algorithms of collectives by kind of group.
    """

    form: str
    semantics: str | None
    dcp: int
    dcp_group: str
    contiguous: bool
    collective: str


class Sharded:
    """The attention of one layer while it is built: the ranks, what costs are called, and the collectives.

    Parameters
    ----------
    b : BlockBuilder
    ranks : ndarray of int32, shape (dp, P, tp)
        Chips of the stage; P is pcp, or cp.
    keys : CostKeys
    kind : int
        Index of the layer kind.
    plan : ShardPlan
    reach : Reach
    attends : {"keys", "latents", "chosen"}
        What attention is over: latents and chosen latents are dealt with in ways of their own.
    scores : bool
        Whether the layer chooses by an indexer of its own.
    """

    def __init__(
        self, b: BlockBuilder, ranks: Ids, keys: CostKeys, kind: int, plan: ShardPlan, reach: Reach, *,
        attends: str, scores: bool,
    ) -> None:  # fmt: skip
        self.b, self.ranks, self.keys, self.kind = b, ranks, keys, kind
        self.plan, self.reach, self.attends, self.scores = plan, reach, attends, scores
        self.pcp, self.tp = ranks.shape[1], ranks.shape[2]
        self.dcp = Groups(plan.dcp_group, plan.dcp)
        self.over_pcp = Groups("pcp", self.pcp)
        # Ranks whose queries an attending rank needs: they hold other heads.
        self.query = Groups("tp", {"tp": plan.dcp, "pcp": 1, "all": self.tp}[plan.dcp_group])
        self.shards = shard_numbers(plan.dcp_group, plan.semantics, self.pcp, self.tp, plan.dcp)
        # Names of traffic: a cp group has one.
        self.pcp_reason, self.dcp_reason = ("pcp", "dcp") if plan.semantics is not None else ("cp_gather", "cp_gather")

    @property
    def pads(self) -> bool:
        """Whether prompts are padded to whole chunks."""
        return self.plan.semantics != "orthogonal"

    def compute(self, name: str, *waits: Ids, reason: str = "attention") -> Ids:
        """Add one op on every rank, all alike."""
        op = self.b.compute(self.ranks, self.keys.duration((name, self.kind)), reason)
        self.wait(op, *waits)
        return op

    def compute_each(self, name: str, classes: NDArray[np.int64], *waits: Ids) -> Ids:
        """Add one attention op on every rank; ``classes``, shape (P, tp), says whose costs each has."""
        op: NDArray[Any] = np.empty(self.ranks.shape, np.int64)
        for one in np.unique(classes).tolist():
            members = classes == one
            duration = self.keys.duration((f"{name}@{one}", self.kind))
            op[:, members] = self.b.compute(self.ranks[:, members], duration, "attention")
        self.wait(op, *waits)
        return op

    def wait(self, op: Ids, *waits: Ids) -> None:
        """Let an op wait for others, each named once."""
        for ids in distinct(waits):
            self.b.edge(ids, op)

    def shard_classes(self) -> NDArray[np.int64]:
        """Return whose costs of attending its shard each rank has."""
        n = int(self.shards.max()) + 1
        classes = [self.reach.shard_class(shard, n) for shard in range(n)]
        return np.array(classes, np.int64)[self.shards]

    def pcp_classes(self, *, alike: bool) -> NDArray[np.int64]:
        """Return whose costs of a rank's new tokens each rank has: all the same, or those of its pcp coordinate."""
        place = np.zeros(self.pcp, np.int64) if alike else np.arange(self.pcp)
        return np.broadcast_to(place[:, None], (self.pcp, self.tp))

    # --- Collectives: what the first sends wait for, and in return what arrives, all per rank ---

    def gather(self, groups: Groups, after: list[Ids], name: str, reason: str) -> list[Ids]:
        """All-gather; nothing where the group is a single rank."""
        return self._collect(all_gather, groups, after, name, reason)

    def scatter(self, groups: Groups, after: list[Ids], name: str, reason: str) -> list[Ids]:
        """Reduce-scatter."""
        return self._collect(reduce_scatter, groups, after, name, reason)

    def reduce(self, groups: Groups, after: list[Ids], name: str, reason: str) -> list[Ids]:
        """All-reduce."""
        return self._collect(all_reduce, groups, after, name, reason)

    def exchange(self, groups: Groups, after: list[Ids], name: str, reason: str) -> list[Ids]:
        """All-to-all."""
        return self._collect(all_to_all, groups, after, name, reason)

    def _collect(self, collective: Any, groups: Groups, after: list[Ids], name: str, reason: str) -> list[Ids]:
        chips = np.ascontiguousarray(groups.split(self.ranks))
        if chips.shape[1] == 1:
            return []
        waits = [groups.split(ids) for ids in distinct(after)]
        message = self.keys.message((name, self.kind))
        algorithm = algorithm_of(self.plan.collective, "cp" if reason == "cp_gather" else reason)
        done = collective(self.b, chips, waits, message, reason, algorithm)
        return [groups.join(ids, self.ranks.shape) for ids in done]
