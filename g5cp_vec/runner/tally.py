"""What a rank's time is added up in: computes, waits and bytes sent, of a step or of one layer of it."""

from __future__ import annotations

from dataclasses import dataclass, field

UNITS = ("gemm", "attention", "elementwise", "fixed")


@dataclass(slots=True)
class Category:
    """Computes of one kind on the reported rank.

    Attributes
    ----------
    name : str
        What they are for, one of ``g5cp_vec.mapping.graph.REASONS``.
    n_ops : int
    seconds : float
    gemm_s, attention_s, elementwise_s, fixed_s : float
        What the time went into; they add up to ``seconds``.
    """

    name: str
    n_ops: int = 0
    seconds: float = 0.0
    gemm_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    fixed_s: float = 0.0


@dataclass(slots=True)
class Wait:
    """Waits of one kind on the reported rank.

    Attributes
    ----------
    name : str
        What the transfer is for that is waited for; ``"other ranks"`` where none of the rank's own is in flight.
    before : str
        The compute that follows, with its step where it has one.
    n_waits : int
    seconds, longest_s : float
        All together, and the longest one.
    """

    name: str
    before: str
    n_waits: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


@dataclass(slots=True)
class Sent:
    """Messages of one kind that the reported rank sends.

    Attributes
    ----------
    name : str
        What they are for, one of ``g5cp_vec.mapping.graph.REASONS``.
    message : str
        Which tensor, as `g5cp_vec.cost.messages` names it; of segments of a cached context also whether full ones or
        the last.
    n_messages : int
        Transfers; a ring of n ranks takes n - 1 of them.
    sent_bytes : int
        All together, exact.
    """

    name: str
    message: str
    n_messages: int = 0
    sent_bytes: int = 0


@dataclass(slots=True)
class Tally:
    """Sums over some ops of the reported rank, by kind; ``span_s`` is from the first start to the last end of them."""

    computes: dict[str, Category] = field(default_factory=dict)
    waits: dict[tuple[str, str], Wait] = field(default_factory=dict)
    sent: dict[tuple[str, str], Sent] = field(default_factory=dict)
    span_s: float = 0.0

    def add_compute(self, name: str, seconds: float, unit_s: list[float]) -> None:
        """Add one op and what its time went into, in the order of `UNITS`."""
        category = self.computes.setdefault(name, Category(name))
        category.n_ops += 1
        category.seconds += seconds
        for unit, part_s in zip(UNITS, unit_s, strict=True):
            setattr(category, f"{unit}_s", getattr(category, f"{unit}_s") + part_s)

    def add_wait(self, name: str, before: str, seconds: float) -> None:
        """Add one wait."""
        wait = self.waits.setdefault((name, before), Wait(name, before))
        wait.n_waits += 1
        wait.seconds += seconds
        wait.longest_s = max(wait.longest_s, seconds)

    def add_sent(self, name: str, message: str, n_bytes: int) -> None:
        """Add one message."""
        sent = self.sent.setdefault((name, message), Sent(name, message))
        sent.n_messages += 1
        sent.sent_bytes += n_bytes

    def largest_computes(self) -> list[Category]:
        """Return the computes, largest first."""
        return sorted(self.computes.values(), key=lambda c: -c.seconds)

    def largest_waits(self) -> list[Wait]:
        """Return the waits, largest first."""
        return sorted(self.waits.values(), key=lambda w: -w.seconds)

    def most_sent(self) -> list[Sent]:
        """Return what is sent, most bytes first."""
        return sorted(self.sent.values(), key=lambda s: -s.sent_bytes)
