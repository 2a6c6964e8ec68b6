"""How the chips are wired: the parameters of each kind of network, not its links (those are the mapping's).

Bandwidths are per direction. A latency is that of one whole route inside its tier, except in a ring, where it is that
of each link.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from g5cp_vec.config._files import anchored_runtime, describe, did_you_mean, locate, read_record, read_toml
from g5cp_vec.config._record import Count, Fraction, NonNegative, Positive, Record
from g5cp_vec.errors import ConfigError


class _Topology(Record):
    """What all kinds have.

    Attributes
    ----------
    protocol_efficiency : float
        Share of a link's rate that payload gets; :func:`load_topology` has multiplied it into the bandwidths already.
    runtime : str or None
        Runtime to assume where the grid names none.
    """

    protocol_efficiency: Fraction = 1.0
    runtime: str | None = None

    def max_chips(self) -> int | None:
        """Return how many chips there are, or None where any number can be had."""
        return None


class Switch(_Topology):
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


class Ring(_Topology):
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


class Hgx(_Topology):
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
    oversubscription : float
        The interfaces of a node together over its share of the spine; 1 for a spine that never blocks.
    chips_used_per_node : int or None
        Chips of a node that take part where several nodes do; None for all.
    """

    kind: Literal["hgx"] = "hgx"
    node_size: Count
    scale_up_bytes_per_s: Positive
    scale_up_latency_s: NonNegative
    nics_per_node: Count
    nic_bytes_per_s: Positive
    scale_out_latency_s: NonNegative
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
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


Topology: TypeAlias = Switch | Ring | Hgx

_KINDS: dict[str, type[Switch] | type[Ring] | type[Hgx]] = {"switch": Switch, "ring": Ring, "hgx": Hgx}


def load_topology(name_or_path: str, base: Path | None = None) -> Topology:
    """Return a topology by preset name or TOML path; see :func:`g5cp_vec.config.model.load_model`."""
    path = locate("topologies", name_or_path, base)
    table = read_toml(path)
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        found = "missing" if kind is None else f"got {describe(kind)}{did_you_mean(str(kind), _KINDS)}"
        raise ConfigError(f"{path}: kind: expected one of {', '.join(_KINDS)}, {found}")
    topology = read_record(_KINDS[kind], path, table)
    payload = {
        name: getattr(topology, name) * topology.protocol_efficiency
        for name in type(topology).model_fields
        if name.endswith("_bytes_per_s")
    }
    return topology.model_copy(update={**payload, "runtime": anchored_runtime(topology.runtime, path)})
