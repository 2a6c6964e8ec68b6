"""A deployment's operation graph, and the key under which deployments share it.

The graph's structure depends on the parallel degrees, the forms, the sequence of layer kinds and the shape of the
network; not on sequence length, batch, element types, chip or bandwidth. Those only change the costs that the
ops' ids stand for (see `g5cp_vec.cost`).

Not modelled: several micro-batches in flight through the stages, the vocabulary-parallel reductions after the
embedding and the head, sampling, and the way of a sampled token back to the first stage.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.model import LayerKind, Model
from g5cp_vec.mapping.graph import Block, BlockBuilder, CostKeys, Ids, OpGraph, chain_blocks
from g5cp_vec.mapping.layer import LayerPlan, add_layer
from g5cp_vec.mapping.network import Network, build_network
from g5cp_vec.mapping.ranks import rank_chips


@dataclass(frozen=True, slots=True)
class Structure:
    """A graph, what its cost ids mean, and the network it runs on."""

    ops: OpGraph
    keys: CostKeys
    network: Network


def layer_kinds(model: Model) -> tuple[list[LayerKind], list[int]]:
    """Return the distinct layer kinds of a model in order of appearance, and the kind of each layer."""
    kinds = list(dict.fromkeys(model.layers))
    index = {kind: i for i, kind in enumerate(kinds)}
    return kinds, [index[layer] for layer in model.layers]


def stage_layers(n_layers: int, pp: int) -> list[range]:
    """Return the layers of each pipeline stage; the first ``n_layers % pp`` stages hold one more."""
    base, extra = divmod(n_layers, pp)
    ends = np.cumsum([base + (stage < extra) for stage in range(pp)])
    return [range(int(end) - base - (stage < extra), int(end)) for stage, end in enumerate(ends)]


def structure_key(dep: Deployment, network: Network) -> Hashable:
    """Return a key that is equal for two deployments exactly when they share a structure."""
    kinds, sequence = layer_kinds(dep.model)
    form = None if dep.cp == 1 else dep.prefill_form or dep.decode_form
    has_shared = dep.model.moe is not None and dep.model.moe.n_shared > 0
    layers = (tuple(kind.ffn for kind in kinds), tuple(sequence), has_shared)
    degrees = (dep.dp, dep.tp, dep.pp, dep.cp, dep.ep)
    return (dep.phase, form, degrees, layers, network.shape, dep.rank_order, dep.collective)


def build_structure(dep: Deployment, network: Network | None = None) -> Structure:
    """Build the operation graph of a deployment, every rank and every layer.

    Parameters
    ----------
    dep : Deployment
    network : Network, optional
        The topology at ``dep.n_chips`` chips; built when absent.
    """
    network = network or build_network(dep.topology, dep.n_chips)
    keys = CostKeys()
    kinds, sequence = layer_kinds(dep.model)
    plan = LayerPlan(
        phase=dep.phase,
        form=dep.prefill_form or dep.decode_form or "",
        collective=dep.collective,
        ep=dep.ep,
        has_shared=dep.model.moe is not None and dep.model.moe.n_shared > 0,
    )
    degrees = {"dp": dep.dp, "pp": dep.pp, "cp": dep.cp, "tp": dep.tp}
    ranks = rank_chips(degrees, dep.rank_order)
    # Ranks that hold tokens between layers: in decode only the owners.
    holders = ranks[:, :, :1] if dep.phase == "decode" else ranks
    blocks = [_embedding(network, holders[:, 0], keys)]
    layers = [-1]
    for stage, stage_range in enumerate(stage_layers(dep.model.n_layers, dep.pp)):
        if stage > 0:
            blocks.append(_transfer(network, holders[:, stage - 1], holders[:, stage], keys))
            layers.append(-1)
        by_kind: dict[int, Block] = {}
        for layer in stage_range:
            kind = sequence[layer]
            if kind not in by_kind:
                b = BlockBuilder(network)
                add_layer(b, ranks[:, stage], plan, keys, kind, kinds[kind].ffn)
                by_kind[kind] = b.build()
            blocks.append(by_kind[kind])
            layers.append(layer)
    # The last token of a head-tail split lives on cp coordinate 0, which also owns the tokens in decode.
    blocks.append(_head(network, ranks[:, -1, :1], keys))
    layers.append(-1)
    return Structure(chain_blocks(blocks, layers, network, dep.n_chips), keys, network)


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


def _head(network: Network, ranks: Ids, keys: CostKeys) -> Block:
    b = BlockBuilder(network)
    b.entry(b.compute(ranks, keys.duration(("lm_head", None)), "lm_head"), ranks)
    return b.build()
