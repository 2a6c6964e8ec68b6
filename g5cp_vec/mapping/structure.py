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
from numpy.typing import NDArray

from g5cp_vec.config.attention import Attention
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.mapping.chain import chain_blocks
from g5cp_vec.mapping.collectives import all_gather
from g5cp_vec.mapping.forms import form_name
from g5cp_vec.mapping.forms.communicators import ShardPlan
from g5cp_vec.mapping.graph import Block, BlockBuilder, Blocks, CostKeys, Ids, OpGraph
from g5cp_vec.mapping.layer import LayerPlan, LayerShape, add_layer
from g5cp_vec.mapping.load import is_contiguous
from g5cp_vec.mapping.network import Network, build_network
from g5cp_vec.mapping.probe import find_symmetry
from g5cp_vec.mapping.ranks import from_groups, groups_along, rank_chips, rank_digits
from g5cp_vec.mapping.sharding import Reach, is_sharded_form
from g5cp_vec.mapping.spans import is_gathered, is_local
from g5cp_vec.mapping.symmetry import Symmetry, no_symmetry

# With fewer sends in a layer, building all ranks costs less than finding out which are alike.
FEWEST_SENDS = 8192


@dataclass(frozen=True)
class Structure:
    """A graph as a chain of blocks, what its cost ids mean, and the network it runs on.

    Attributes
    ----------
    side_by_side : Blocks
        Distinct blocks, of the orbits of ``symmetry``.
    chain : list of int
        Which of them, in program order.
    layers : list of int
        Layer of the model at each place of the chain, -1 for none.
    keys : CostKeys
    network : Network
    n_chips : int
    symmetry : Symmetry
    dep : Deployment
    reach : sequence of int
        Of one of the points that share the structure, as in `structure_key`.
    """

    side_by_side: Blocks
    chain: list[int]
    layers: list[int]
    keys: CostKeys
    network: Network
    n_chips: int
    symmetry: Symmetry
    dep: Deployment
    reach: Sequence[int]

    @cached_property
    def blocks(self) -> list[Block]:
        """Each distinct block."""
        return self.side_by_side.split()

    @cached_property
    def whole(self) -> Structure:
        """The same without symmetry: every rank's ops."""
        return self if self.symmetry.order == 1 else build_structure(self.dep, self.network, self.reach)

    def orbit_of_ops(self, block: int) -> NDArray[np.int64]:
        """Return which op of a block stands for each op of the same block of the whole graph."""
        own, all_ = self.blocks[block].handle, self.whole.blocks[block].handle
        slot, home = np.divmod(all_, self.n_chips)
        order = np.argsort(own)
        lowest = slot * self.n_chips + self.symmetry.chips[self.symmetry.chip_orbit[home]]
        found: NDArray[np.int64] = order[np.searchsorted(own, lowest, sorter=order)]
        return found

    @cached_property
    def ops(self) -> OpGraph:
        """The whole graph, every rank and every layer."""
        chained = [self.whole.blocks[i] for i in self.chain]
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
        dispatch=dep.moe_dispatch,
    )


def _shard_plan(dep: Deployment) -> ShardPlan:
    form = dep.prefill_form or dep.decode_form
    assert form is not None
    return ShardPlan(
        form=form,
        semantics=dep.cp_semantics,
        dcp=dep.dcp,
        dcp_group=dep.dcp_group,
        contiguous=is_contiguous(dep),
        collective=dep.collective,
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
        elif kind.linear is not None and dep.sequence_ranks > 1:
            mixer = "apart" if dep.phase == "decode" else "states" if dep.cp > 1 else "handed_over"
        if mixer in ("halo", "gathered"):
            numbers = reach[at : at + n_numbers]
        shapes.append(
            LayerShape(
                mixer=mixer,
                ffn=kind.ffn,
                has_shared=kind.moe is not None and kind.moe.n_shared > 0,
                uniform=mixer == "halo" and a is not None and a.span == "window",
                scores=mixer in ("gathered", "sharded") and a is not None and a.scores is not None,
                taps=mixer in ("states", "handed_over") and kind.linear is not None and kind.linear.conv_kernel > 1,
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


def build_structure(
    dep: Deployment, network: Network | None = None, reach: Sequence[int] = (), *, symmetric: bool = False
) -> Structure:
    """Build the blocks of a deployment's operation graph, all ranks of each distinct layer.

    Parameters
    ----------
    dep : Deployment
    network : Network, optional
        The topology at ``dep.n_chips`` chips; built when absent.
    reach : sequence of int
        As in `structure_key`.
    symmetric : bool
        Build one rank of every orbit of the symmetry that can be proven, instead of all.
    """
    network = network or build_network(dep.topology, dep.n_chips)
    # The place of cp is pcp's: they do not go together.
    degrees = {"dp": dep.dp, "pp": dep.pp, "cp": dep.sequence_ranks, "tp": dep.tp}
    ranks = rank_chips(degrees, dep.rank_order)
    symmetry = no_symmetry(network)
    n_sends = 4 * dep.tp + 2 * dep.cp + (2 * (dep.ep + max(dep.dp // dep.ep, 1) * dep.tp) if dep.ep else 0)
    if symmetric and dep.n_chips * n_sends >= FEWEST_SENDS:

        def describe(probe: BlockBuilder) -> None:
            _lay_out(dep, ranks, reach, CostKeys(len(network.rates())), probe)

        symmetry = find_symmetry(network, ranks, *rank_digits(dep.dp, dep.tp, dep.moe_tp or 1), describe)
    keys = CostKeys(len(network.rates()))
    b = BlockBuilder(network, symmetry, library_calls=dep.runtime.has_library_latency)
    chain, layers = _lay_out(dep, ranks, reach, keys, b)
    return Structure(b.build(), chain, layers, keys, network, dep.n_chips, symmetry, dep, reach)


def _lay_out(
    dep: Deployment, ranks: Ids, reach: Sequence[int], keys: CostKeys, b: BlockBuilder
) -> tuple[list[int], list[int]]:
    """Add every distinct block; return their order in the chain, and the layers that the chain holds."""
    sequence = dep.model.kinds[1]
    plan, shapes = _layer_plan(dep), _layer_shapes(dep, reach)
    # Ranks that hold tokens between layers: with pass-Q only the owners.
    holders = ranks[:, :, :1] if dep.has_owner else ranks
    chain: list[int] = []
    layers: list[int] = []

    def append(block: int, layer: int = -1) -> None:
        chain.append(block)
        layers.append(layer)

    append(b.begin())
    _add_embedding(b, holders[:, 0], keys)
    for stage, stage_range in enumerate(stage_layers(dep.model.n_layers, dep.pp)):
        if stage > 0:
            append(b.begin())
            _add_transfer(b, holders[:, stage - 1], holders[:, stage], keys)
        by_kind: dict[int, int] = {}
        for layer in stage_range:
            kind = sequence[layer]
            if kind not in by_kind:
                by_kind[kind] = b.begin()
                add_layer(b, ranks[:, stage], plan, keys, kind, shapes[kind])
            append(by_kind[kind], layer)
    append(b.begin())
    # Every rank that holds tokens runs the head, as one program on all ranks does, whoever holds the last token.
    _add_head(b, holders[:, -1], keys, dep)
    return chain, layers


def _add_embedding(b: BlockBuilder, ranks: Ids, keys: CostKeys) -> None:
    b.exit(b.compute(ranks, keys.duration(("embed", None)), "embed"), ranks)


def _add_transfer(b: BlockBuilder, ranks: Ids, following: Ids, keys: CostKeys) -> None:
    sent = b.flow(ranks, following, keys.message("pp"), "pp")
    b.entry(sent, ranks)
    b.exit(sent, following)


def _add_head(b: BlockBuilder, ranks: Ids, keys: CostKeys, dep: Deployment) -> None:
    """Add the head, on all tokens of a pcp group once their final hidden states are gathered over it."""
    first = b.compute(ranks, keys.duration(("final_norm" if dep.pcp > 1 else "lm_head", None)), "lm_head")
    if dep.pcp > 1:
        chips, normed = groups_along(ranks, 1), groups_along(first, 1)
        gathered = all_gather(b, chips, [normed], keys.message("pcp_hidden"), "pcp", dep.algorithm("pcp"))
        head = b.compute(ranks, keys.duration(("lm_head", None)), "lm_head")
        for ids in gathered:
            b.edge(from_groups(ids, ranks.shape, 1), head)
    b.entry(first, ranks)
