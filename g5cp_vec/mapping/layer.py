"""One transformer layer of one pipeline stage, for all its ranks at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from g5cp_vec.config.collectives import algorithm_of
from g5cp_vec.config.context import ALL_GATHER
from g5cp_vec.mapping.collectives import (
    all_gather,
    all_reduce,
    direct_exchange,
    distinct,
    hierarchical_all_reduce,
    node_members,
    rail_all_reduce,
    reduce_scatter,
)
from g5cp_vec.mapping.experts import gathered_experts
from g5cp_vec.mapping.forms import DECODE_FORMS, PREFILL_FORMS
from g5cp_vec.mapping.forms.communicators import Sharded, ShardPlan
from g5cp_vec.mapping.forms.gathered import gathered
from g5cp_vec.mapping.forms.halo import halo
from g5cp_vec.mapping.forms.handed_over import handed_over
from g5cp_vec.mapping.forms.sharded import sharded_decode, sharded_prefill
from g5cp_vec.mapping.forms.sparse import sparse_decode, sparse_prefill
from g5cp_vec.mapping.forms.states import states
from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Ids
from g5cp_vec.mapping.ranks import expert_digits, expert_groups, from_groups, groups_along
from g5cp_vec.mapping.sharding import Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """What decides the structure of all layers beside their ranks.

    ``form`` names how full attention is distributed, None where it is not; ``sharded`` says more of the deployed forms;
    ``has_owner`` whether only cp coordinate 0 holds tokens; ``pools_pcp`` whether experts are laid over the second axis
    of the ranks too; ``all_reduce`` how groups that span nodes reduce; ``library_calls`` whether calls of the
    collective library have latencies of their own; ``ep`` and ``dispatch``, how tokens come to experts, are None for
    models without experts.
    """

    phase: str
    form: str | None
    sharded: ShardPlan | None
    has_owner: bool
    pools_pcp: bool
    collective: str
    all_reduce: str
    library_calls: bool
    ep: int | None
    dispatch: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What decides the structure of one layer.

    Attributes
    ----------
    mixer : {"form", "sharded", "halo", "gathered", "states", "handed_over", "apart", "none"}
        How attention is distributed: as the plan says, with a sharded cache, by halos, by gathering keys or states, by
        handing states over, not at all (each rank does that of the tokens it holds), or there is none.
    ffn : {"dense", "moe", "none"}
    has_shared : bool
        Whether some experts see every token.
    uniform, scores, taps : bool
        See `g5cp_vec.mapping.forms.halo`, `g5cp_vec.mapping.forms.gathered`, `g5cp_vec.mapping.forms.states`.
    attends : {"keys", "latents", "chosen"}
        What attention with a sharded cache is over.
    reach : tuple of int
        What of the load decides the structure: see `g5cp_vec.mapping.spans.structure_reach`.
    """

    mixer: str
    ffn: str
    has_shared: bool = False
    uniform: bool = False
    scores: bool = False
    taps: bool = False
    attends: str = "keys"
    reach: tuple[int, ...] = ()


def add_layer(b: BlockBuilder, ranks: Ids, plan: LayerPlan, keys: CostKeys, kind: int, shape: LayerShape) -> None:
    """Add one layer.

    Parameters
    ----------
    b : BlockBuilder
    ranks : ndarray of int32, shape (dp, cp, tp)
        Chips of the stage.
    plan : LayerPlan
    keys : CostKeys
    kind : int
        Index of the layer kind, part of every cost key.
    shape : LayerShape
    """
    # Where the cp coordinate 0 owns the tokens it does everything but attend.
    owners = ranks[:, :1] if plan.has_owner else ranks
    after: list[Ids] = []
    if shape.mixer != "none":
        qkv = b.compute(owners, keys.duration(("qkv", kind)), "qkv")
        b.entry(qkv, owners)
        if shape.mixer in ("sharded", "handed_over"):
            attended = _add_sharded(b, ranks, plan, keys, kind, shape, qkv)
        else:
            attended = [_add_attention(b, ranks, plan, keys, kind, shape, qkv)]
        o_proj = _add_compute(b, owners, attended, keys.duration(("o_proj", kind)), "o_proj")
        after = _add_tp_all_reduce(b, owners, [o_proj], plan, keys)
    if shape.ffn != "none":
        name, reason = ("ffn", "ffn") if shape.ffn == "dense" else ("router", "moe")
        first = _add_compute(b, owners, after, keys.duration((name, kind)), reason)
        if not after:
            b.entry(first, owners)
        if shape.ffn == "moe":
            # As experts see them, ranks of different pcp coordinate are replicas.
            pool = (-1, 1, owners.shape[2]) if plan.pools_pcp else owners.shape
            combined = _add_moe(b, owners.reshape(pool), first.reshape(pool), plan, keys, kind, shape.has_shared)
            after = [ids.reshape(owners.shape) for ids in combined]
        else:
            after = [first]
        after = _add_tp_all_reduce(b, owners, after, plan, keys)
    for done in after:
        b.exit(done, owners)


def _add_compute(b: BlockBuilder, ranks: Ids, after: list[Ids], duration: int, reason: str) -> Ids:
    op = b.compute(ranks, duration, reason)
    for pred in after:
        b.edge(pred, op)
    return op


def _add_attention(
    b: BlockBuilder, ranks: Ids, plan: LayerPlan, keys: CostKeys, kind: int, shape: LayerShape, qkv: Ids
) -> Ids:
    if ranks.shape[1] == 1 or shape.mixer == "apart":
        owners = ranks[:, :1] if plan.has_owner else ranks
        return _add_compute(b, owners, [qkv], keys.duration(("attention", kind)), "attention")
    algorithm = algorithm_of(plan.collective, "cp")
    if shape.mixer == "halo":
        return halo(b, ranks, qkv, keys, kind, shape.reach, uniform=shape.uniform)
    if shape.mixer == "gathered":
        (n_short,) = shape.reach
        return gathered(b, ranks, qkv, keys, kind, n_short, scores=shape.scores, collective=algorithm)
    if shape.mixer == "states":
        return states(b, ranks, qkv, keys, kind, taps=shape.taps, collective=algorithm)
    assert plan.form is not None
    forms = PREFILL_FORMS if plan.phase == "prefill" else DECODE_FORMS
    return forms[plan.form](b, ranks, qkv, keys, kind)


def _add_sharded(
    b: BlockBuilder, ranks: Ids, plan: LayerPlan, keys: CostKeys, kind: int, shape: LayerShape, qkv: Ids
) -> list[Ids]:
    assert plan.sharded is not None
    reach = Reach(*shape.reach) if shape.reach else Reach(0, 0, 0, 0)
    s = Sharded(b, ranks, keys, kind, plan.sharded, reach, attends=shape.attends, scores=shape.scores)
    if shape.mixer == "handed_over":
        return [handed_over(s, qkv, taps=shape.taps)]
    if shape.attends == "chosen":
        return sparse_prefill(s, qkv) if plan.phase == "prefill" else sparse_decode(s, qkv)
    return sharded_prefill(s, qkv) if plan.phase == "prefill" else sharded_decode(s, qkv)


def _add_tp_all_reduce(b: BlockBuilder, ranks: Ids, after: list[Ids], plan: LayerPlan, keys: CostKeys) -> list[Ids]:
    if ranks.shape[2] == 1:
        return after
    chips, groups = groups_along(ranks, 2), [groups_along(ids, 2) for ids in after]
    members = None if plan.all_reduce == "flat" else node_members(b.network.nodes(chips))
    if members is None:
        done = all_reduce(b, chips, groups, keys.message("tp_chunk"), "tp", algorithm_of(plan.collective, "tp"))
    else:
        expand = rail_all_reduce if plan.all_reduce == "rails" else hierarchical_all_reduce
        inside, across = (keys.message((f"tp_{plan.all_reduce}_{where}", members)) for where in ("inside", "across"))
        done = expand(b, chips, groups, members, inside, across, "tp")
    return [from_groups(ids, ranks.shape, 2) for ids in done]


def _add_moe(
    b: BlockBuilder, ranks: Ids, router: Ids, plan: LayerPlan, keys: CostKeys, kind: int, has_shared: bool
) -> list[Ids]:
    """Dispatch, shared and routed experts, combine, after the router.

    Where the ranks that split an expert (moe_tp) span replicas, the replicas' tokens are all-gathered over them
    before the dispatch and the results reduce-scattered after the combine. The shared experts need no dispatched
    token, so their op runs while the dispatch is under way.
    """
    assert plan.ep is not None
    if plan.dispatch == ALL_GATHER:
        return gathered_experts(b, ranks, router, plan.collective, keys, kind, has_shared=has_shared)
    dp, cp, tp = ranks.shape
    ep, algorithm = plan.ep, algorithm_of(plan.collective, "ep")
    spans_replicas = dp * tp // ep > tp
    ep_chips, moe_tp_chips = expert_groups(ranks, ep)
    ep_digits, moe_tp_digits = expert_digits(dp, tp, ep)

    def ep_form(ids: Ids) -> Ids:
        return expert_groups(ids, ep)[0]

    def moe_tp_form(ids: Ids) -> Ids:
        return expert_groups(ids, ep)[1]

    tokens = [router]
    if spans_replicas:
        gathered = all_gather(
            b, moe_tp_chips, [moe_tp_form(router)], keys.message("ep_gather"), "ep", algorithm, 0, moe_tp_digits
        )
        tokens = distinct(tokens + [_from_expert_groups(ids, ranks.shape, ep, striding=False) for ids in gathered])
    received = tokens
    if ep > 1:
        waits = [ep_form(ids) for ids in tokens]
        arrived = direct_exchange(b, ep_chips, waits, keys.message("ep_dispatch"), "ep", digits=ep_digits)
        received = tokens + [_from_expert_groups(ids, ranks.shape, ep, striding=True) for ids in arrived]
    if has_shared:
        received = [*received, _add_compute(b, ranks, [router], keys.duration(("shared", kind)), "moe")]
    experts = _add_compute(b, ranks, distinct(received), keys.duration(("experts", kind)), "moe")
    done = [experts]
    if ep > 1:
        returned = direct_exchange(
            b, ep_chips, [ep_form(experts)], keys.message("ep_combine"), "ep", 1, digits=ep_digits
        )
        done += [_from_expert_groups(ids, ranks.shape, ep, striding=True) for ids in returned]
    if spans_replicas:
        waits = [moe_tp_form(ids) for ids in done]
        scattered = reduce_scatter(b, moe_tp_chips, waits, keys.message("ep_gather"), "ep", algorithm, 1, moe_tp_digits)
        done += [_from_expert_groups(ids, ranks.shape, ep, striding=False) for ids in scattered]
    return done


def _from_expert_groups(groups: Ids, shape: tuple[int, ...], ep: int, *, striding: bool) -> Ids:
    """Undo `expert_groups`: ids per rank, shape (dp, cp, tp), from ids per EP group or per moe_tp group."""
    dp, cp, tp = shape
    moe_tp = dp * tp // ep
    by_cp = groups.reshape(cp, moe_tp, ep).transpose(0, 2, 1) if striding else groups
    return np.ascontiguousarray(by_cp.reshape(cp, dp, tp).transpose(1, 0, 2))
