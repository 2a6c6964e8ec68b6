"""How the chips are wired: the parameters of each kind of network, not its routes (those are the mapping's).

Bandwidths are per direction. A latency is that of one whole route inside its tier, except in a ring, torus, full mesh
or graph, where it is that of each link. What the kinds of several tiers mean stands in `g5cp_vec.config.tiers`, what a
list of links does in `g5cp_vec.config.graph`, and how grouped YAML is read in `g5cp_vec.config.grouped`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from g5cp_vec.config._files import anchored_runtime, describe, did_you_mean, locate, read_record, read_toml
from g5cp_vec.config._machine import Degrade, Machine
from g5cp_vec.config._record import Count, Few, Fraction, Frozen, NonNegative, Positive
from g5cp_vec.config.graph import Graph, Wire
from g5cp_vec.config.grouped import Grouped, grouped_machine, is_yaml
from g5cp_vec.config.links import LinkNames, MeshNames, NodeNames, PortNames, TorusNames, matcher
from g5cp_vec.config.tiers import FatTree, Tiered
from g5cp_vec.errors import ConfigError

__all__ = [
    "Degrade",
    "FatTree",
    "FullMesh",
    "Graph",
    "Grouped",
    "Hgx",
    "Ring",
    "Switch",
    "Tiered",
    "Topology",
    "Torus",
    "Wire",
    "load_topology",
]

# A mesh has a link for every pair of chips: 17 million.
MOST_MESHED_CHIPS = 4096


class Switch(Machine):
    """Every chip has one link up to and one link down from a switch that never blocks.

    Attributes
    ----------
    n_chips : int or None
        Ports; None for as many as asked for.
    chip_bandwidth_bytes_per_s : float
        Of each link (bytes/s).
    latency_s : float
        From chip to chip (s).
    """

    kind: Literal["switch"] = "switch"
    n_chips: Count | None = None
    chip_bandwidth_bytes_per_s: Positive
    latency_s: NonNegative

    def max_chips(self) -> int | None:
        """Return the number of ports."""
        return self.n_chips

    def links(self, n_chips: int) -> LinkNames:
        """Return an up and a down link per chip."""
        return PortNames(n_chips)


class Ring(Machine):
    """Every chip has a link to each of its two neighbours; routes are the shortest.

    Attributes
    ----------
    link_bandwidth_bytes_per_s : float
        Of each link (bytes/s).
    latency_s : float
        Of each link (s).
    """

    kind: Literal["ring"] = "ring"
    link_bandwidth_bytes_per_s: Positive
    latency_s: NonNegative

    def links(self, n_chips: int) -> TorusNames:
        """Return those of a torus of one dimension."""
        return TorusNames((n_chips,))


def _listed(value: Any) -> Any:
    if isinstance(value, list | tuple) and value:
        return tuple(value)
    raise ValueError(f"expected a list of sizes, got {describe(value)}")


class Torus(Machine):
    """Chips on a grid that closes in every dimension, a link each way between neighbours.

    Chip x0 + dims[0] * (x1 + dims[1] * (x2 + ...)) has the coordinates (x0, x1, x2, ...): the first dimension varies
    fastest, so that ranks which follow one another on the chips are neighbours. Routes go along the first dimension,
    then the second, ..., in each the shorter way round, upwards on a tie. A dimension of two has one link each way.

    Attributes
    ----------
    dims : tuple of int
        Chips along each dimension; their product is the number of chips, and every deployment uses them all.
    link_bandwidth_bytes_per_s : float
        Of each link (bytes/s).
    latency_s : float
        Of each link (s).
    """

    kind: Literal["torus"] = "torus"
    dims: Annotated[tuple[Count, ...], BeforeValidator(_listed)]
    link_bandwidth_bytes_per_s: Positive
    latency_s: NonNegative

    def max_chips(self) -> int | None:
        """Return the product of the dimensions."""
        return math.prod(self.dims)

    def _size_obstacle(self, n_chips: int) -> str | None:
        if n_chips != self.max_chips():
            product = "*".join(map(str, self.dims))
            return f"n_chips = {n_chips}, but topology {self.name} has exactly {product} = {self.max_chips()} chips"
        return None

    def links(self, n_chips: int) -> TorusNames:  # noqa: ARG002 (the dimensions say how many chips there are)
        """Return those of every dimension."""
        return TorusNames(self.dims)


class FullMesh(Machine):
    """A link each way between every two chips.

    Attributes
    ----------
    n_chips : int or None
        Chips there are; None for as many as asked for.
    link_bandwidth_bytes_per_s : float
        Of each link (bytes/s).
    latency_s : float
        Of each link (s).
    """

    kind: Literal["full_mesh"] = "full_mesh"
    n_chips: Annotated[int, Field(gt=0, le=MOST_MESHED_CHIPS)] | None = None
    link_bandwidth_bytes_per_s: Positive
    latency_s: NonNegative

    def max_chips(self) -> int | None:
        """Return the number of chips, or how many can be modelled."""
        return self.n_chips or MOST_MESHED_CHIPS

    def _size_obstacle(self, n_chips: int) -> str | None:
        if self.n_chips is None and n_chips > MOST_MESHED_CHIPS:
            return f"n_chips = {n_chips}, but a full mesh is modelled with up to {MOST_MESHED_CHIPS} chips"
        return super()._size_obstacle(n_chips)

    def links(self, n_chips: int) -> LinkNames:
        """Return a link for every ordered pair of chips."""
        return MeshNames(n_chips)


class Hgx(Machine):
    """Nodes of switched chips (the scale-up tier), joined by a fabric of network interfaces (scale-out).

    Attributes
    ----------
    node_size : int
        Chips in a node.
    scale_up_bytes_per_s : float
        Of each chip's link inside the node (bytes/s).
    scale_up_latency_s, scale_out_latency_s : float
        From chip to chip inside a node, and between nodes (s).
    nics_per_node : int
    nic_bytes_per_s : float
        Of each network interface (bytes/s).
    scale_up_efficiency, scale_out_efficiency : float
        Share of the rate that payload gets inside a node, and of interfaces and spine; besides `protocol_efficiency`.
    oversubscription : float
        The interfaces of a node together over its share of the spine; 1 for a spine that never blocks.
    chips_used_per_node : int or None
        Chips of a node that take part where several nodes do; None for all.
    """

    kind: Literal["hgx"] = "hgx"
    node_size: Count
    scale_up_bytes_per_s: Positive
    scale_up_latency_s: NonNegative
    nics_per_node: Few
    nic_bytes_per_s: Positive
    scale_out_latency_s: NonNegative
    scale_up_efficiency: Fraction = 1.0
    scale_out_efficiency: Fraction = 1.0
    oversubscription: Annotated[Positive, Field(ge=1)] = 1.0
    chips_used_per_node: Count | None = None

    @model_validator(mode="after")
    def _used_chips_exist(self) -> Self:
        if self.chips_used_per_node is not None and self.chips_used_per_node > self.node_size:
            raise ValueError(
                f"chips_used_per_node = {self.chips_used_per_node} is more than node_size = {self.node_size}"
            )
        return self

    def used_per_node(self, n_chips: int) -> int:
        """Return the chips of each node that a deployment on `n_chips` chips occupies.

        One node gives all it has; beyond that `chips_used_per_node` keeps groups aligned with nodes.
        """
        if n_chips <= self.node_size:
            return n_chips
        return self.chips_used_per_node or self.node_size

    def has_spine(self, n_chips: int) -> bool:
        """Whether the links between nodes and spine are modelled.

        A full spine never limits more than the network interfaces do: its links count where a fault hits one.
        """
        n_nodes = -(-n_chips // self.used_per_node(n_chips))
        names = [f"node{node}.{way}" for node in range(n_nodes) for way in ("up", "down")]
        patterns = [pattern for fault in self.degrade for pattern in fault.link]
        is_hit = any(matcher(pattern)(name) for pattern in patterns for name in names)
        return n_nodes > 1 and (self.oversubscription > 1.0 or is_hit)

    def links(self, n_chips: int) -> NodeNames:
        """Return the chips' links, and where there are several nodes the NICs' and an oversubscribed spine's."""
        used = self.used_per_node(n_chips)
        return NodeNames(n_chips, used, self.nics_per_node, has_spine=self.has_spine(n_chips))


Topology: TypeAlias = Switch | Ring | Torus | FullMesh | Graph | Hgx | FatTree | Tiered | Grouped

# Grouped is not among them: it has a format of its own.

_KINDS: dict[str, type[Machine]] = {
    "switch": Switch,
    "ring": Ring,
    "torus": Torus,
    "full_mesh": FullMesh,
    "graph": Graph,
    "hgx": Hgx,
    "fat_tree": FatTree,
    "tiered": Tiered,
}
FrozenT = TypeVar("FrozenT", bound=Frozen)


def _payload(record: FrozenT, efficiency: float) -> FrozenT:
    """Return a record with every bandwidth reduced to what payload gets of it."""
    update: dict[str, Any] = {}
    for name in type(record).model_fields:
        value = getattr(record, name)
        if name.endswith("_bytes_per_s"):
            update[name] = value * efficiency
        elif isinstance(value, tuple):
            update[name] = tuple(_payload(entry, efficiency) if isinstance(entry, Frozen) else entry for entry in value)
    return record.model_copy(update=update)


def load_topology(name_or_path: str, base: Path | None = None) -> Topology:
    """Return a topology by preset name or path, of TOML or of grouped YAML.

    See :func:`g5cp_vec.config.model.load_model`, and `g5cp_vec.config.grouped` for the YAML.
    """
    path = locate("topologies", name_or_path, base)
    topology = grouped_machine(path) if is_yaml(path) else _read_kind(path)
    runtime = anchored_runtime(topology.runtime, path)
    try:
        loaded = _payload(topology, topology.protocol_efficiency).model_copy(update={"runtime": runtime})
    except ValidationError:
        share = topology.protocol_efficiency
        raise ConfigError(f"{path}: protocol_efficiency: {share!r} leaves a bandwidth of next to nothing") from None
    assert isinstance(loaded, Topology)
    return loaded


def _read_kind(path: Path) -> Machine:
    table = read_toml(path)
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        hint = did_you_mean(kind, _KINDS) if isinstance(kind, str) else ""
        found = "missing" if kind is None else f"got {describe(kind)}{hint}"
        raise ConfigError(f"{path}: kind: expected one of {', '.join(_KINDS)}, {found}")
    return read_record(_KINDS[kind], path, table)
