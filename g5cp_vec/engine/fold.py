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

PERIOD_RTOL = 1e-12

# Columns of a run: first op, ops of a unit, units simulated, units left out.
RUN_FIRST = 0
RUN_UNIT = 1
RUN_KEPT = 2
RUN_EXTRA = 3


@kernel
def _first_start(at, begin, end):
    """Instant of the first start."""
    first = at[begin]["start"]
    for op in range(begin + 1, end):
        first = min(first, at[op]["start"])
    return first


@kernel
def _oldest_in_flight(at, begun, oldest):
    """Earliest start of the ops in flight once ``begun`` instants have begun; ``oldest`` itself when there is none."""
    for op in range(len(at)):
        if at[op]["start"] < begun and at[op]["finish"] >= begun:
            oldest = min(oldest, at[op]["start"])
    return oldest


@kernel
def _begun(instant_s, at, until_s):
    """How many instants begin up to ``until_s``, among which is instant ``at``."""
    at += 1
    while at < len(instant_s) and instant_s[at] <= until_s:
        at += 1
    return at


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
    instant_s, at = times.instant_s, times.at
    first, unit, kept = run[RUN_FIRST], run[RUN_UNIT], run[RUN_KEPT]
    last = first + (kept - 1) * unit
    a, b = _first_start(at, last - unit, last), _first_start(at, last, last + unit)
    a_s, b_s = instant_s[a], instant_s[b]
    out_window_s[0], out_window_s[1] = a_s, b_s
    period_s = b_s - a_s
    eps_s = PERIOD_RTOL * period_s
    # What has begun by then: all instants before these.
    by_a, by_b = _begun(instant_s, a, a_s + eps_s), _begun(instant_s, b, b_s + eps_s)
    oldest_s = instant_s[_oldest_in_flight(at, by_a, a)]
    for op in range(first):
        if instant_s[at[op]["finish"]] > oldest_s + eps_s:
            return False
    for op in range(first, first + unit):
        if instant_s[at[op]["finish"]] > oldest_s + period_s + eps_s:
            return False
    for op in range(last + unit, len(at)):
        if at[op]["start"] < by_b:
            return False
    for op in range(first, last):
        image = op + unit
        has_started, has_ended = at[op]["start"] < by_a, at[op]["finish"] < by_a
        if has_started != (at[image]["start"] < by_b) or has_ended != (at[image]["finish"] < by_b):
            return False
        if not has_started:
            continue
        finish_s, image_finish_s = instant_s[at[op]["finish"]], instant_s[at[image]["finish"]]
        # Either of the two may reach into the past that decides.
        if finish_s >= oldest_s - eps_s or image_finish_s >= oldest_s + period_s - eps_s:
            if abs(instant_s[at[image]["start"]] - instant_s[at[op]["start"]] - period_s) > eps_s:
                return False
            if has_ended and abs(image_finish_s - finish_s - period_s) > eps_s:
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
