"""What the kinds of topology have in common: payload rates, a runtime, faults, and whether a deployment finds room."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, model_validator

from g5cp_vec.config._files import describe
from g5cp_vec.config._record import Count, Fraction, Frozen, Record
from g5cp_vec.config.links import LinkNames

# Each is numbered and may be named; a million chips on nodes of eight have a quarter of them.
MOST_LINKS = 2**24


def _tables(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(value)
    raise ValueError(f"expected a list of tables, got {describe(value)}")


def _some_tables(value: Any) -> Any:
    if isinstance(value, list | tuple) and value:
        return tuple(value)
    raise ValueError(f"expected a list of tables, at least one, got {describe(value)}")


# Before the schema of an array of tables: TOML has lists, records have tuples.
Tables = BeforeValidator(_tables)
SomeTables = BeforeValidator(_some_tables)


def _one_or_more(value: Any) -> list[Any] | None:
    """Return a list of what may be written alone, None for an empty list; () is what stands for nothing written."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    return None if value == [] else listed


def _patterns(value: Any) -> tuple[str, ...]:
    listed = _one_or_more(value)
    if listed is not None and all(isinstance(pattern, str) and pattern for pattern in listed):
        return tuple(listed)
    raise ValueError(f"expected the name of a link, with * for any text, or a list of them, got {describe(value)}")


def _chips(value: Any) -> tuple[int, ...]:
    listed = _one_or_more(value)
    # Not isinstance: true is no chip.
    if listed is not None and all(type(chip) is int and chip >= 0 for chip in listed):
        return tuple(listed)
    raise ValueError(f"expected the number of a chip, from 0, or a list of them, got {describe(value)}")


class Degrade(Frozen):
    """A fault: links that carry less, or chips that compute more slowly; several on one link or chip multiply.

    Attributes
    ----------
    link : tuple of str
        Patterns of names; see :mod:`g5cp_vec.config.links`.
    chip : tuple of int
        Chips whose compute operations take 1 / ``factor`` times as long, fixed overheads included.
    factor : float
        What is left of the capacity or of the speed (0-1].
    """

    link: Annotated[tuple[str, ...], BeforeValidator(_patterns)] = ()
    chip: Annotated[tuple[int, ...], BeforeValidator(_chips)] = ()
    factor: Fraction

    @model_validator(mode="after")
    def _hits_one_thing(self) -> Self:
        if bool(self.link) == bool(self.chip):
            raise ValueError(f"expected either link or chip, got {'both' if self.link else 'neither'}")
        return self


class SizedEfficiency(Frozen):
    """Share of a link's rate that messages of a size get.

    Attributes
    ----------
    bytes : int
    fraction : float
    """

    bytes: Count
    fraction: Fraction


class Machine(Record):
    """What all kinds have.

    Attributes
    ----------
    protocol_efficiency : float
        Share of a link's rate that payload gets; :func:`g5cp_vec.config.topology.load_topology` has multiplied it
        into the bandwidths already.
    efficiency : tuple of SizedEfficiency
        In place of `protocol_efficiency`: the share by the size of a message, rising sizes; linear in the logarithm of
        the size between them, constant beyond.
    runtime : str or None
        Runtime to assume where the grid names none.
    degrade : tuple of Degrade
        Faults, for what-if studies.
    """

    protocol_efficiency: Fraction = 1.0
    efficiency: Annotated[tuple[SizedEfficiency, ...], Tables] = ()
    runtime: str | None = None
    degrade: Annotated[tuple[Degrade, ...], Tables] = ()

    @model_validator(mode="after")
    def _one_efficiency(self) -> Self:
        sizes = [entry.bytes for entry in self.efficiency]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"efficiency: expected rising bytes, got {', '.join(map(str, sizes))}")
        if sizes and self.protocol_efficiency != 1.0:
            raise ValueError("efficiency: expected either this table or protocol_efficiency, got both")
        return self

    def payload_fraction(self, message: NDArray[np.float64]) -> Any:
        """Return the share of a link's rate that messages of some sizes (bytes) get, beside `protocol_efficiency`."""
        if not self.efficiency:
            return 1.0
        sizes = [entry.bytes for entry in self.efficiency]
        return np.interp(np.log(np.maximum(message, 1.0)), np.log(sizes), [entry.fraction for entry in self.efficiency])

    def max_chips(self) -> int | None:
        """Return how many chips there are, or None where any number can be had."""
        return None

    @abstractmethod
    def links(self, n_chips: int) -> LinkNames:
        """Return the links of the machine with `n_chips` chips."""

    @property
    def is_degraded(self) -> bool:
        """Whether any fault takes something away."""
        return any(fault.factor < 1 for fault in self.degrade)

    @cached_property
    def _known_obstacles(self) -> dict[int, str | None]:
        return {}

    def obstacle(self, n_chips: int) -> str | None:
        """Return why no deployment can have `n_chips` chips of this machine; None where it can."""
        if n_chips not in self._known_obstacles:
            obstacle = self._size_obstacle(n_chips) or self._link_obstacle(n_chips) or self._fault_obstacle(n_chips)
            self._known_obstacles[n_chips] = obstacle
        return self._known_obstacles[n_chips]

    def _size_obstacle(self, n_chips: int) -> str | None:
        limit = self.max_chips()
        if limit is not None and n_chips > limit:
            return f"n_chips = {n_chips}, but topology {self.name} has {limit} chips"
        return None

    def _link_obstacle(self, n_chips: int) -> str | None:
        n_links = self.links(n_chips).n_links
        if n_links > MOST_LINKS:
            return f"n_chips = {n_chips}: topology {self.name} has {n_links} links, expected at most {MOST_LINKS}"
        return None

    def _fault_obstacle(self, n_chips: int) -> str | None:
        links = self.links(n_chips)
        for place, fault in enumerate(self.degrade):
            for chip in fault.chip:
                if chip >= n_chips:
                    return f"n_chips = {n_chips}, but topology {self.name} degrades chip {chip} (degrade[{place}])"
            for pattern in fault.link:
                if not len(links.matching(pattern)):
                    nearest = ", ".join(links.nearest(pattern)) or "none, there are no links"
                    return (
                        f"topology {self.name} with n_chips = {n_chips} has no link {describe(pattern)} "
                        f"(degrade[{place}]); nearest: {nearest}"
                    )
        return None
