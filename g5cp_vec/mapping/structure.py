"""A deployment's operation graph, and the key under which deployments share it.

The graph's structure depends on the parallel degrees, the forms, the sequence of layer kinds and the shape of the
network; not on sequence length, batch, element types, chip or bandwidth. Those only change the costs that the
ops' ids stand for (see `g5cp_vec.cost`). One thing of the lengths decides the structure too, where a split sequence
meets windows, chunks or sparse attention: how far back each part of it reaches (`g5cp_vec.mapping.spans`).

Not modelled: several micro-batches in flight through the stages, the vocabulary-parallel reductions after the
embedding and the head, sampling, and the way of a sampled token back to the first stage.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from g5cp_vec.config.attention import Attention
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.mapping.collectives import all_gather
from g5cp_vec.mapping.forms import form_name
from g5cp_vec.mapping.forms.communicators import ShardPlan
from g5cp_vec.mapping.graph import Block, BlockBuilder, CostKeys, Ids, OpGraph, chain_blocks
from g5cp_vec.mapping.layer import LayerPlan, LayerShape, add_layer
from g5cp_vec.mapping.network import Network, build_network
from g5cp_vec.mapping.ranks import from_groups, groups_along, rank_chips
from g5cp_vec.mapping.sharding import Reach, is_sharded_form
from g5cp_vec.mapping.spans import is_gathered, is_local


@dataclass(frozen=True)
class Structure:
    """A graph as a chain of blocks, what its cost ids mean, and the network it runs on.

    Attributes
    ----------
    blocks : list of Block
        Distinct blocks.
    chain : list of int
        Index into ``blocks``, in program order.
    layers : list of int
        Layer of the model at each place of the chain, -1 for none.
    keys : CostKeys
    network : Network
    n_chips : int
    """

    blocks: list[Block]
    chain: list[int]
    layers: list[int]
    keys: CostKeys
    network: Network
    n_chips: int

    @cached_property
    def ops(self) -> OpGraph:
        """The whole graph, every rank and every layer."""
        chained = [self.blocks[i] for i in self.chain]
        return chain_blocks(chained, self.layers, self.network.link_capacity, self.n_chips)


def stage_layers(n_layers: int, pp: int) -> list[range]:
    """Return the layers of each pipeline stage; the first ``n_layers % pp`` stages hold one more."""
    base, extra = divmod(n_layers, pp)
    ends = np.cumsum([base + (stage < extra) for stage in range(pp)])
    return [range(int(end) - base - (stage < extra), int(end)) for stage, end in enumerate(ends)]


def _layer_plan(dep: Deployment) -> LayerPlan:
    """Return what a deployment says of the structure of its layers."""
    return LayerPlan(
        phase=dep.phase,
        form=form_name(dep),
        sharded=_shard_plan(dep) if is_sharded_form(dep) else None,
        has_owner=dep.has_owner,
        pools_pcp=dep.pcp > 1,
        collective=dep.collective,
        all_reduce=dep.runtime.all_reduce(dep.phase),
        library_calls=dep.runtime.has_library_latency,
        ep=dep.ep,
    )


def _shard_plan(dep: Deployment) -> ShardPlan:
    form = dep.prefill_form or dep.decode_form
    assert form is not None
    return ShardPlan(
        form=form, semantics=dep.cp_semantics, dcp=dep.dcp, dcp_group=dep.dcp_group, collective=dep.collective
    )


def _attends(a: Attention) -> str:
    if a.kind == "gqa":
        return "keys"
    return "chosen" if a.span == "sparse" else "latents"


def _layer_shapes(dep: Deployment, reach: Sequence[int]) -> tuple[LayerShape, ...]:
    """Return what decides the structure of each layer kind; ``reach`` is one row of `structure_reach`."""
    sharded = is_sharded_form(dep)
    shapes, at = [], 0
    for kind in dep.model.kinds[0]:
        a, n_numbers, mixer = kind.softmax, 0, "none" if kind.attention is None else "form"
        numbers: Sequence[int] = ()
        if sharded and a is not None:
            mixer, numbers = "sharded", reach  # the same of all layers
        elif is_local(dep, kind):
            mixer, n_numbers = "halo", 2 * dep.cp
        elif is_gathered(dep, kind):
            mixer, n_numbers = "gathered", 1
        elif kind.linear is not None and dep.cp > 1:
            mixer = "states" if dep.phase == "prefill" else "owner"
        if mixer in ("halo", "gathered"):
            numbers = reach[at : at + n_numbers]
        shapes.append(
            LayerShape(
                mixer=mixer,
                ffn=kind.ffn,
                has_shared=kind.moe is not None and kind.moe.n_shared > 0,
                uniform=mixer == "halo" and a is not None and a.span == "window",
                scores=mixer in ("gathered", "sharded") and a is not None and a.scores is not None,
                taps=mixer == "states" and kind.linear is not None and kind.linear.conv_kernel > 1,
                attends=_attends(a) if mixer == "sharded" and a is not None else "keys",
                reach=tuple(map(int, numbers)),
            )
        )
        at += n_numbers
    at = len(Reach._fields) if sharded else at
    if at != len(reach):
        raise ValueError(f"reach: expected {at} numbers of structure_reach, got {len(reach)}")
    return tuple(shapes)


def structure_key(dep: Deployment, network: Network, reach: Sequence[int] = ()) -> Hashable:
    """Return a key that is equal for two points exactly when they share a structure.

    Parameters
    ----------
    dep : Deployment
    network : Network
    reach : sequence of int
        The point's row of `g5cp_vec.mapping.spans.structure_reach`.
    """
    layers = (_layer_shapes(dep, reach), tuple(dep.model.kinds[1]))
    degrees = (dep.dp, dep.tp, dep.pp, dep.cp, dep.pcp)
    return (_layer_plan(dep), layers, degrees, network.shape, dep.rank_order)


def build_structure(dep: Deployment, network: Network | None = None, reach: Sequence[int] = ()) -> Structure:
    """Build the blocks of a deployment's operation graph, all ranks of each distinct layer.

    Parameters
    ----------
    dep : Deployment
    network : Network, optional
        The topology at ``dep.n_chips`` chips; built when absent.
    reach : sequence of int
        As in `structure_key`.
    """
    network = network or build_network(dep.topology, dep.n_chips)
    keys = CostKeys(len(network.rates()))
    sequence = dep.model.kinds[1]
    plan, shapes = _layer_plan(dep), _layer_shapes(dep, reach)
    # The place of cp is pcp's: they do not go together.
    degrees = {"dp": dep.dp, "pp": dep.pp, "cp": dep.sequence_ranks, "tp": dep.tp}
    ranks = rank_chips(degrees, dep.rank_order)
    # Ranks that hold tokens between layers: with pass-Q only the owners.
    holders = ranks[:, :, :1] if dep.has_owner else ranks
    blocks = [_embedding(network, holders[:, 0], keys)]
    chain, layers = [0], [-1]

    def append(block: Block) -> None:
        blocks.append(block)
        chain.append(len(blocks) - 1)
        layers.append(-1)

    for stage, stage_range in enumerate(stage_layers(dep.model.n_layers, dep.pp)):
        if stage > 0:
            append(_transfer(network, holders[:, stage - 1], holders[:, stage], keys))
        by_kind: dict[int, int] = {}
        for layer in stage_range:
            kind = sequence[layer]
            if kind not in by_kind:
                b = BlockBuilder(network, library_calls=plan.library_calls)
                add_layer(b, ranks[:, stage], plan, keys, kind, shapes[kind])
                by_kind[kind] = len(blocks)
                blocks.append(b.build())
            chain.append(by_kind[kind])
            layers.append(layer)
    # Every rank that holds tokens runs the head, as one program on all ranks does, whoever holds the last token.
    append(_head(network, holders[:, -1], keys, dep))
    return Structure(blocks, chain, layers, keys, network, dep.n_chips)


def _embedding(network: Network, ranks: Ids, keys: CostKeys) -> Block:
    b = BlockBuilder(network)
    b.exit(b.compute(ranks, keys.duration(("embed", None)), "embed"), ranks)
    return b.build()


def _transfer(network: Network, ranks: Ids, following: Ids, keys: CostKeys) -> Block:
    b = BlockBuilder(network)
    sent = b.flow(ranks, following, keys.message("pp"), "pp")
    b.entry(sent, ranks)
    b.exit(sent, following)
    return b.build()


def _head(network: Network, ranks: Ids, keys: CostKeys, dep: Deployment) -> Block:
    """Add the head, on all tokens of a pcp group once their final hidden states are gathered over it."""
    b = BlockBuilder(network)
    first = b.compute(ranks, keys.duration(("final_norm" if dep.pcp > 1 else "lm_head", None)), "lm_head")
    if dep.pcp > 1:
        chips, normed = groups_along(ranks, 1), groups_along(first, 1)
        gathered = all_gather(b, chips, [normed], keys.message("pcp_hidden"), "pcp", dep.collective)
        head = b.compute(ranks, keys.duration(("lm_head", None)), "lm_head")
        for ids in gathered:
            b.edge(from_groups(ids, ranks.shape, 1), head)
    b.entry(first, ranks)
    return b.build()
