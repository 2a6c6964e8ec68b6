"""Symmetry classes and repeated layers by their definitions (``semantics.md`` §5), and events in a plain mapping.

A *system* is a mapping: ``ops``, each with label, kind ("compute" or "flow"), chip, preds, entries (chips it waits for)
and route; ``chips``, each with label and exits (ops that deliver to what comes next); ``links``, each with a label.
"""

from __future__ import annotations

from collections import Counter


def _multiset(members, colours):
    return frozenset(Counter(colours[m] for m in members).items())


def surroundings(system, op_colour, chip_colour, link_colour):
    """Return all that tells ops, chips and links apart once their neighbours have the colours given."""
    ops = system["ops"]
    of_ops = [
        (
            op["label"],
            op["kind"],
            chip_colour[op["chip"]] if op["kind"] == "compute" else None,
            frozenset(op_colour[before] for before in op["preds"]),
            _multiset(op["entries"], chip_colour),
            _multiset(op["route"], link_colour),
        )
        for op in ops
    ]
    runs_on = [[i for i, op in enumerate(ops) if op["kind"] == "compute" and op["chip"] == chip]
               for chip in range(len(system["chips"]))]  # fmt: skip
    crossed_by = [[i for i, op in enumerate(ops) if link in op["route"]] for link in range(len(system["links"]))]
    of_chips = [
        (chip["label"], _multiset(runs_on[i], op_colour), _multiset(chip["exits"], op_colour))
        for i, chip in enumerate(system["chips"])
    ]
    of_links = [(link["label"], _multiset(crossed_by[i], op_colour)) for i, link in enumerate(system["links"])]
    return of_ops, of_chips, of_links


def numbered(things):
    """Return a number for each, equal things alike, counted up as they first appear."""
    numbers = {}
    return [numbers.setdefault(thing, len(numbers)) for thing in things]


def refine(system):
    """Tell apart what differs, then what has different neighbours, and so on until nothing new is told apart."""
    colours = [[0] * len(system[kind]) for kind in ("ops", "chips", "links")]
    while True:
        seen = surroundings(system, *colours)
        finer = [numbered(zip(old, new, strict=True)) for old, new in zip(colours, seen, strict=True)]
        if finer == colours:
            return finer
        colours = finer


def is_equitable(system, *colours):
    """Whether things of one colour have the same surroundings."""
    seen = surroundings(system, *colours)
    return all(len(set(zip(c, s, strict=True))) == len(set(c)) for c, s in zip(colours, seen, strict=True))


def class_edges(system, op_colour):
    """Return the pairs of colours of which the first op of one waits for an op of the other."""
    return {
        (op_colour[before], colour)
        for colour in set(op_colour)
        for before in system["ops"][op_colour.index(colour)]["preds"]
    }


def class_routes(system, op_colour, link_colour):
    """Return, for each op colour, how many flows of it cross the first link of each link colour, where any does."""
    first_links = [link_colour.index(colour) for colour in range(len(set(link_colour)))]
    found = []
    for colour in range(len(set(op_colour))):
        mine = [op["route"] for i, op in enumerate(system["ops"]) if op_colour[i] == colour]
        crossing = {k: sum(link in route for route in mine) for k, link in enumerate(first_links)}
        found.append({k: n for k, n in crossing.items() if n})
    return found


def repeats(start, finish, first, unit, kept):
    """Return whether a chain of ``kept`` units has settled into a period, and when its last two units start.

    The history of a moment is what has started by then, when, and when it ended if it has; as far back as the start of
    the oldest op in flight. The two moments must have one history, a unit apart, and nothing else in it.
    """
    units = [range(first + k * unit, first + (k + 1) * unit) for k in range(kept)]
    a, b = (min(start[op] for op in ops) for ops in units[-2:])
    oldest = min([a, *(start[op] for op in range(len(start)) if start[op] <= a < finish[op])])

    def history(op, now, since):
        """What is to be known of one op at a moment, in seconds from it."""
        if start[op] > now:
            return "to come"
        if finish[op] > now:
            return start[op] - now, "runs"
        return "long ago" if finish[op] < since else (start[op] - now, finish[op] - now)

    period = b - a
    settled = (
        all(history(op, a, oldest) == history(op + unit, b, oldest + period) for ops in units[:-1] for op in ops)
        # What came before the run, and at the later moment the first unit, which is nobody's image, lie further back.
        and all(finish[op] <= oldest for op in range(first))
        and all(finish[op] <= oldest + period for op in units[0])
        and all(start[op] > b for op in range(first + kept * unit, len(start)))
    )
    return settled, (a, b)


def lengthen(times, first, unit, kept, window):
    """Return the times of a chain with one more unit: the window once more, and all after it a period later.

    An op's copies come one after another, the first at or before the window's end.
    """
    a, b = window
    period = b - a
    copies = [[times[first + k * unit + i] for k in range(kept)] for i in range(unit)]
    for mine in copies:
        upto = sum(t <= b for t in mine)
        mine[upto - 1 :] = [mine[upto - 1], *(t + period for t in mine[upto - 1 :])]
    inside = [mine[k] for k in range(kept + 1) for mine in copies]
    return [*times[:first], *inside, *(t + period for t in times[first + kept * unit :])]


def unfold(times, runs, windows):
    """Return the times of the whole chain; each run is ``(first op, ops of a unit, units kept, units left out)``."""
    times, shift, added = list(times), 0, 0
    for (first, unit, kept, extra), (a, b) in zip(runs, windows, strict=True):
        # Windows are times of the short chain, of which what came before is longer by now.
        a, b = a + shift, b + shift
        period = b - a
        for k in range(extra):
            times = lengthen(times, first + added, unit, kept + k, (a + k * period, b + k * period))
        shift, added = shift + extra * period, added + extra * unit
    return times


class Events:
    """Events and their times, looked through from end to end each time."""

    def __init__(self):
        self.at = {}

    def set(self, op, time):
        self.at[op] = time

    def take_due(self, limit):
        due = {op for op, time in self.at.items() if time <= limit}
        for op in due:
            del self.at[op]
        return due
