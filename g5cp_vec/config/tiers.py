"""Machines of several tiers: switches over switches (``fat_tree``), and units within units (``tiered``).

In both a latency is that of one whole route that goes as high as its level and no higher, whatever it crosses there.
Chips are numbered unit by unit, and a deployment on fewer than all uses the first ones.
"""

from __future__ import annotations

import math
import re
from itertools import accumulate
from operator import mul
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from g5cp_vec.config._files import describe
from g5cp_vec.config._machine import Machine, SomeTables
from g5cp_vec.config._record import Count, Frozen, NonNegative, Positive
from g5cp_vec.config.links import MOST_LINKS, TierNames, TreeNames

# Numbers follow the names of units in names of links, and "chip" is taken.
_UNIT = re.compile(r"(?!chip$)[A-Za-z](?:[A-Za-z_-]*[A-Za-z_])?")


def sizes(factors: tuple[int, ...]) -> tuple[int, ...]:
    """Return 1 and the products of the first factor, of the first two, ...: chips in a unit of each level."""
    return tuple(accumulate(factors, mul, initial=1))


class TreeLevel(Frozen):
    """One level of switches of a fat tree.

    Attributes
    ----------
    radix : int
        Chips, or switches of the level below, under each switch.
    bandwidth_bytes_per_s : float
        Of each link down from these switches (bytes/s).
    latency_s : float
        Of a route that turns round at this level, from chip to chip (s).
    oversubscription : float
        Links down over links up of a switch of this level; the highest has none up.
    """

    radix: Count
    bandwidth_bytes_per_s: Positive
    latency_s: NonNegative
    oversubscription: Annotated[Positive, Field(ge=1)] = 1.0


class FatTree(Machine):
    """Switches over switches, with as many links up as down but for `oversubscription`.

    A chip has one link up. A switch has one link up for each link down, or fewer by its oversubscription, so that under
    levels of o0, o1, ... a switch over c chips has c / (o0 * o1 * ...) of them. They are modelled as one link of their
    total bandwidth: traffic spreads over them evenly. Routes go up to the lowest switch over both chips, and down.

    Attributes
    ----------
    level : tuple of TreeLevel
        From the chips upwards.
    """

    kind: Literal["fat_tree"] = "fat_tree"
    level: Annotated[tuple[TreeLevel, ...], SomeTables]

    @model_validator(mode="after")
    def _top_is_the_top(self) -> Self:
        if self.sizes[-1] > MOST_LINKS:
            raise ValueError(f"level: the radices multiply to {self.sizes[-1]} chips, expected at most {MOST_LINKS}")
        top = self.level[-1]
        if top.oversubscription != 1.0:
            raise ValueError(
                f"level[{len(self.level) - 1}].oversubscription = {top.oversubscription}, "
                "but switches of the highest level have no links up: give it to a level below"
            )
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Chips under a switch of each level, 1 before them for the chip itself."""
        return sizes(tuple(level.radix for level in self.level))

    def max_chips(self) -> int | None:
        """Return the product of the radices."""
        return self.sizes[-1]

    @property
    def bytes_per_s(self) -> list[float]:
        """Bandwidth of what leads up to each level: a chip's link, then all those of a switch of the level below."""
        oversubscriptions = accumulate((level.oversubscription for level in self.level), mul, initial=1.0)
        shares = zip(self.sizes, self.level, oversubscriptions, strict=False)
        return [size * level.bandwidth_bytes_per_s / less for size, level, less in shares]

    def links(self, n_chips: int) -> TreeNames:
        """Return a link up and a link down per chip, and per switch below the lowest one over all chips in use."""
        return TreeNames(n_chips, self.sizes)


def _unit_name(value: Any) -> str:
    if isinstance(value, str) and _UNIT.fullmatch(value):
        return value
    raise ValueError(f"expected a name of letters, _ and -, not 'chip', got {describe(value)}")


class Tier(Frozen):
    """What joins the parts of a unit: chips to a board, boards to a rack, ...

    Attributes
    ----------
    name : str
        Of a unit; its number follows in names of links.
    size : int
        Parts of a unit.
    connect : {"full_mesh", "ring", "switch"}
        A link each way between every two parts; between neighbours around a ring; one up and one down per part.
    bandwidth_bytes_per_s : float
        Of each link, shared by all chips of the part that it leads from, and of the part that it leads to (bytes/s).
    latency_s : float
        Of a route inside a unit between two of its parts, from chip to chip (s).
    """

    name: Annotated[str, BeforeValidator(_unit_name)]
    size: Count
    connect: Literal["full_mesh", "ring", "switch"]
    bandwidth_bytes_per_s: Positive
    latency_s: NonNegative

    @property
    def links_per_unit(self) -> int:
        """Links among the parts of one unit."""
        if self.connect == "full_mesh":
            return self.size * (self.size - 1)
        return self.size * (2 if self.connect == "switch" else min(self.size - 1, 2))


class Tiered(Machine):
    """Units within units, as pods hold racks, racks hold boards and boards hold chips.

    Two chips are joined by the smallest unit that holds both, over the link or links between the two parts of it that
    they are in, and over no other: what leads from one board to another is one link that all chips of both boards
    share, and what joins chips inside a board does not see that traffic. Around a ring the shorter way, upwards on a
    tie; parts of a unit that hold no chip in use forward.

    Attributes
    ----------
    level : tuple of Tier
        From the chips outwards.
    """

    kind: Literal["tiered"] = "tiered"
    level: Annotated[tuple[Tier, ...], SomeTables]

    @model_validator(mode="after")
    def _units_are_told_apart_and_counted(self) -> Self:
        names = [tier.name for tier in self.level]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ValueError(f"level[{place}].name = {name!r} names level[{names.index(name)}] already")
        n_links = sum(self.max_chips() // size * tier.links_per_unit for size, tier in self._larger())
        if n_links > MOST_LINKS:
            raise ValueError(f"level: {n_links} links in all, expected at most {MOST_LINKS}")
        return self

    def _larger(self) -> list[tuple[int, Tier]]:
        return list(zip(self.sizes[1:], self.level, strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Chips in a unit of each level, 1 before them for the chip itself."""
        return sizes(tuple(tier.size for tier in self.level))

    def max_chips(self) -> int:
        """Return the product of the sizes."""
        return math.prod(tier.size for tier in self.level)

    def links(self, n_chips: int) -> TierNames:
        """Return those of every unit in use, up to the smallest one that holds all chips in use."""
        return TierNames(n_chips, [(tier.name, tier.size, tier.connect, tier.links_per_unit) for tier in self.level])
