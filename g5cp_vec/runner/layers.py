"""A step layer by layer: runs of layers that compute and send the same are shown as one.

A compute and a message belong to their layer, a wait to the layer of the transfer that is waited for, or, where none
is in flight, to that of the compute that follows. So computes and waits of all layers add up to the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from g5cp_vec.runner.tally import Category, Sent, Tally, Wait

# Of the step: times that differ by less are the same; they are differences of instants that were rounded.
_SAME = 1e-9
# Places outside layers, in program order before and after them; a transfer between stages counts as before.
EMBED, TRANSFER, HEAD = -3, -2, 2**31
_NAMES = {EMBED: "embed", TRANSFER: "pp", HEAD: "head"}


@dataclass(frozen=True, slots=True)
class Layers:
    """A run of layers that compute and send the same; numbers are those of each of them.

    How long layers wait may differ where ranks drift apart: then waits are means over the run, and ``shortest_s`` and
    ``longest_s`` say how much.

    Attributes
    ----------
    name : str
        ``"layer"``; ``"embed"``, ``"pp"`` (transfers between stages) or ``"head"`` outside layers.
    first, last : int or None
        Layers of the model, from 0; None outside layers.
    n_layers : int
    seconds, shortest_s, longest_s : float
        Computes and waits: mean, least and most.
    span_s : float
        From the first start to the last end of an op of the rank, transfers into and out of it among them. Those of
        two layers may overlap.
    exposed_s : float
        Waits.
    computes : list of Category
    waits : list of Wait
        ``n_waits`` counts those of the whole run.
    sent : list of Sent
    """

    name: str
    first: int | None
    last: int | None
    n_layers: int
    seconds: float
    shortest_s: float
    longest_s: float
    span_s: float
    exposed_s: float
    computes: list[Category]
    waits: list[Wait]
    sent: list[Sent]


def group_layers(tallies: Mapping[int, Tally], step_s: float) -> list[Layers]:
    """Return runs of equal layers in program order; ``tallies`` by layer, or by a place outside layers."""
    runs: list[list[int]] = []
    for place in sorted(tallies):
        before = runs[-1][-1] if runs else None
        if before is not None and before + 1 == place and before >= 0 and _alike(tallies, before, place, step_s):
            runs[-1].append(place)
        else:
            runs.append([place])
    return [_of_run(run, [tallies[place] for place in run]) for run in runs]


def _alike(tallies: Mapping[int, Tally], one: int, other: int, step_s: float) -> bool:
    a, b = tallies[one], tallies[other]
    if _counts(a) != _counts(b):
        return False
    return all(abs(x - y) <= _SAME * step_s for x, y in zip(_compute_times(a), _compute_times(b), strict=True))


def _counts(tally: Tally) -> list[Any]:
    computes = sorted((name, c.n_ops) for name, c in tally.computes.items())
    return [computes, sorted((key, s.n_messages, s.sent_bytes) for key, s in tally.sent.items())]


def _compute_times(tally: Tally) -> list[float]:
    return [tally.computes[name].seconds for name in sorted(tally.computes)]


def _seconds(tally: Tally) -> float:
    return sum(c.seconds for c in tally.computes.values()) + sum(w.seconds for w in tally.waits.values())


def _of_run(run: list[int], tallies: list[Tally]) -> Layers:
    """Return the mean over a run, so that as many of it as there are add up to the run."""
    n, outside = len(run), _NAMES.get(run[0])
    mean = Tally(span_s=sum(t.span_s for t in tallies) / n)
    for name, c in tallies[0].computes.items():
        of_all = [t.computes[name] for t in tallies]
        times = ("seconds", "gemm_s", "attention_s", "elementwise_s", "fixed_s")
        mean.computes[name] = Category(name, c.n_ops, *(sum(getattr(c, t) for c in of_all) / n for t in times))
    for tally in tallies:
        for key, w in tally.waits.items():
            wait = mean.waits.setdefault(key, Wait(*key))
            wait.n_waits += w.n_waits
            wait.seconds += w.seconds / n
            wait.longest_s = max(wait.longest_s, w.longest_s)
    each_s = [_seconds(tally) for tally in tallies]
    return Layers(
        name=outside or "layer",
        first=None if outside else run[0],
        last=None if outside else run[-1],
        n_layers=n,
        seconds=sum(each_s) / n,
        shortest_s=min(each_s),
        longest_s=max(each_s),
        span_s=mean.span_s,
        exposed_s=sum(w.seconds for w in mean.waits.values()),
        computes=mean.largest_computes(),
        waits=mean.largest_waits(),
        sent=tallies[0].most_sent(),
    )
