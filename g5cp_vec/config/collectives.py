"""Which algorithm the collectives of each kind of group use.

One word for all of them, ``ring`` or ``direct``, or one for each kind, written ``tp=ring,pcp=direct``; ``best`` is
decided by simulation.
"""

from __future__ import annotations

from collections.abc import Mapping

COLLECTIVES = ("ring", "direct")
BEST = "best"
# Kinds of groups whose collectives have a choice, in the order in which it is made.
GROUPS = ("tp", "ep", "pcp", "dcp", "cp")


def algorithm_of(collective: str, group: str) -> str:
    """Return the algorithm of one kind of group; of one that is not named the first of them."""
    if "=" not in collective:
        return collective
    return dict(part.split("=") for part in collective.split(",")).get(group, COLLECTIVES[0])


def written(algorithms: Mapping[str, str]) -> str:
    """Return the word for what each kind of group uses."""
    return ",".join(f"{group}={algorithms[group]}" for group in GROUPS if group in algorithms)
