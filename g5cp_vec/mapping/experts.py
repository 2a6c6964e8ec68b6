"""Experts whose tokens are all-gathered: every rank sees the tokens of all replicas and computes its experts' part.

After the router a rank gathers hidden states, then the router's logits, from the ranks of its place in the other
replicas (data parallel ones, or those of other pcp coordinate); its experts compute what was routed to them; their
outputs for all tokens are sums of a few terms each, reduce-scattered over the same ranks. What the ranks of a replica
contribute is summed by the tensor-parallel all-reduce that follows the layer. So bytes do not depend on ep, nor on how
many ranks split an expert. vLLM and vllm-ascend run experts so under pcp, and vLLM by default under dp.

Shared experts need no gathered token, so they run while it is under way.
"""

from __future__ import annotations

from g5cp_vec.config.collectives import algorithm_of
from g5cp_vec.mapping.collectives import all_gather, distinct, reduce_scatter
from g5cp_vec.mapping.graph import BlockBuilder, CostKeys, Ids
from g5cp_vec.mapping.ranks import from_groups, groups_along


def gathered_experts(
    b: BlockBuilder, ranks: Ids, router: Ids, collective: str, keys: CostKeys, kind: int, *, has_shared: bool
) -> list[Ids]:
    """Add the experts of a layer after its router; return what a rank must wait for.

    Parameters
    ----------
    ranks : ndarray of int32, shape (replicas, cp, tp)
    router : ndarray, same shape
        Ops that tokens and logits are ready after.
    """
    algorithm = algorithm_of(collective, "ep")
    chips = groups_along(ranks, 0)

    def of_groups(ids: Ids) -> Ids:
        return groups_along(ids, 0)

    def per_rank(ids: Ids) -> Ids:
        return from_groups(ids, ranks.shape, 0)

    def compute(name: str, waits: list[Ids]) -> Ids:
        op = b.compute(ranks, keys.duration((name, kind)), "moe")
        for pred in waits:
            b.edge(pred, op)
        return op

    if chips.shape[1] == 1:  # every rank has all tokens
        shared = [compute("shared", [router])] if has_shared else []
        return [compute("experts", [router, *shared])]
    n_steps = chips.shape[1] - 1 if algorithm == "ring" else 1
    ready = of_groups(router)
    hidden = all_gather(b, chips, [ready], keys.message("moe_hidden"), "ep", algorithm)
    # One communicator: logits follow.
    waits = hidden if algorithm == "direct" else [*hidden, ready]
    arrived = all_gather(b, chips, waits, keys.message(("moe_logits", kind)), "ep", algorithm, n_steps)
    received = [per_rank(ids) for ids in distinct([*hidden, *arrived])]
    if has_shared:
        received.append(compute("shared", [router]))
    experts = compute("experts", received)
    sums = reduce_scatter(b, chips, [of_groups(experts)], keys.message("moe_sums"), "ep", algorithm, 2 * n_steps)
    return [experts, *(per_rank(ids) for ids in sums)]
