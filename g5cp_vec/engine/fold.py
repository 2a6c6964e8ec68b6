"""Repeated layers: whether a short chain is periodic already, and what follows for the long one.

A run of R equal units is simulated with K < R of them. Let t_a and t_b be the first starts of units K-2 and K-1. If
the state at t_b is the state at t_a moved by one unit and by P = t_b - t_a, then so is every later state of a longer
run until its end comes into sight, and the end is the same for both: T(R) = T(K) + (R - K) P, exactly.

The states are equal when, over the past that decides them (back to the start of the oldest op in flight at t_a, and
to its image before t_b), every op and its image one unit later started and ended P apart, the same ops have started
and ended, nothing from before the run is left and nothing from after it has begun. All comparisons are to 1e-12 of
the period.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import finish_s, start_s

PERIOD_RTOL = 1e-12

# Columns of a run: first op, ops of a unit, units simulated, units left out.
RUN_FIRST = 0
RUN_UNIT = 1
RUN_KEPT = 2
RUN_EXTRA = 3


@kernel
def _first_start_s(times, begin, end):
    first_s = start_s(times, begin)
    for op in range(begin + 1, end):
        first_s = min(first_s, start_s(times, op))
    return first_s


@kernel
def _oldest_in_flight_s(times, at_s, oldest_s):
    """Earliest start of the ops in flight just after ``at_s``; ``oldest_s`` when none started before that."""
    for op in range(len(times.at)):
        if start_s(times, op) <= at_s < finish_s(times, op):
            oldest_s = min(oldest_s, start_s(times, op))
    return oldest_s


@kernel
def is_periodic(times, run, out_window_s):
    """Whether the states at the first starts of a run's last two units are equal up to their distance.

    Parameters
    ----------
    times : Instants
    run : ndarray of int64, shape (4,)
        ``RUN_*``.
    out_window_s : ndarray of float64, shape (2,)
        t_a and t_b.

    Returns
    -------
    bool
    """
    first, unit, kept = run[RUN_FIRST], run[RUN_UNIT], run[RUN_KEPT]
    last = first + (kept - 1) * unit
    a_s, b_s = _first_start_s(times, last - unit, last), _first_start_s(times, last, last + unit)
    out_window_s[0], out_window_s[1] = a_s, b_s
    period_s = b_s - a_s
    eps_s = PERIOD_RTOL * period_s
    # What has begun by then.
    by_a_s, by_b_s = a_s + eps_s, b_s + eps_s
    oldest_s = _oldest_in_flight_s(times, by_a_s, a_s)
    for op in range(first):
        if finish_s(times, op) > oldest_s + eps_s:
            return False
    for op in range(first, first + unit):
        if finish_s(times, op) > oldest_s + period_s + eps_s:
            return False
    for op in range(last + unit, len(times.at)):
        if start_s(times, op) <= by_b_s:
            return False
    for op in range(first, last):
        image = op + unit
        has_started, has_ended = start_s(times, op) <= by_a_s, finish_s(times, op) <= by_a_s
        if has_started != (start_s(times, image) <= by_b_s) or has_ended != (finish_s(times, image) <= by_b_s):
            return False
        if not has_started:
            continue
        # Either of the two may reach into the past that decides.
        if finish_s(times, op) >= oldest_s - eps_s or finish_s(times, image) >= oldest_s + period_s - eps_s:
            if abs(start_s(times, image) - start_s(times, op) - period_s) > eps_s:
                return False
            if has_ended and abs(finish_s(times, image) - finish_s(times, op) - period_s) > eps_s:
                return False
    return True


@kernel(allocates=True, entry=True)
def unfold(times_s, runs, windows_s, n_ops_full):
    """Derive the times of the whole chain from those of the short one.

    The long run is the short one up to t_b, then the window (t_a, t_b] over and over, then the rest of the short one.
    So of an op's copies, those up to the last one at or before t_b keep their times, that one is repeated a period
    later each time, and the others follow after what was left out.

    Parameters
    ----------
    times_s : ndarray of float64, shape (n_ops_short,)
        Starts or ends.
    runs : ndarray of int64, shape (n_runs, 4)
        In order of the chain.
    windows_s : ndarray of float64, shape (n_runs, 2)
    n_ops_full : int

    Returns
    -------
    ndarray of float64, shape (n_ops_full,)
    """
    out = np.empty(n_ops_full)
    shift_s = 0.0
    at, done = 0, 0
    for r in range(len(runs)):
        first, unit, kept, extra = runs[r]
        period_s = windows_s[r, 1] - windows_s[r, 0]
        limit_s = windows_s[r, 1] + PERIOD_RTOL * period_s
        while done < first:
            out[at] = times_s[done] + shift_s
            at += 1
            done += 1
        for i in range(unit):
            last = 0
            while last + 1 < kept and times_s[first + (last + 1) * unit + i] <= limit_s:
                last += 1
            for copy in range(kept + extra):
                if copy <= last:
                    time_s = times_s[first + copy * unit + i]
                elif copy <= last + extra:
                    time_s = times_s[first + last * unit + i] + (copy - last) * period_s
                else:
                    time_s = times_s[first + (copy - extra) * unit + i] + extra * period_s
                out[at + copy * unit + i] = time_s + shift_s
        at += (kept + extra) * unit
        done = first + kept * unit
        shift_s += extra * period_s
    while done < len(times_s):
        out[at] = times_s[done] + shift_s
        at += 1
        done += 1
    return out
