"""Numbers that would do in place of one that does not."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(key: str, asked: int, fitting: Iterable[int]) -> str:
    """Name the next smaller and the next larger of the values that fit; nothing where there are none."""
    values = sorted(fitting)
    below, above = [v for v in values if v < asked][-1:], [v for v in values if v > asked][:1]
    either = " or ".join(map(str, below + above))
    return f"; {key} = {either} would do" if either else ""


def divisors(n: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
