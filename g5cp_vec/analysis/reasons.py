"""Why points are invalid, in as many lines as a person reads."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"[0-9]+( or [0-9]+)*")


def group_reasons(reasons: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Join reasons that differ in numbers only.

    Parameters
    ----------
    reasons : iterable of (str, int)
        A reason, and how many points have it.

    Returns
    -------
    list of (str, int)
        The most frequent reason of each group, with how many others it stands for, and the points of all of them; most
        points first.
    """
    groups: dict[str, list[tuple[str, int]]] = {}
    for reason, n in reasons:
        groups.setdefault(_NUMBER.sub("#", reason), []).append((reason, n))
    joined = []
    for group in groups.values():
        first = max(group, key=lambda pair: pair[1])[0]
        others = f" (and {len(group) - 1} more with other numbers)" if len(group) > 1 else ""
        joined.append((first + others, sum(n for _, n in group)))
    return sorted(joined, key=lambda pair: -pair[1])
