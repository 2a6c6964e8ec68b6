"""Many rows of costs through one graph: the part of them that falls to one worker.

Workers are threads of the caller's, each with its own workspace; a worker owns every ``n_workers``-th row and no
output is a sum over rows, so results are bit-identical for any number of them.
"""

from __future__ import annotations

import numpy as np

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_EVENTS, OK, Costs, make_workspace
from g5cp_vec.engine.fold import is_periodic
from g5cp_vec.engine.measure import measure, scratch_width
from g5cp_vec.engine.schedule import simulate

# Beside the engine's own statuses: a run left out units although it is not periodic; simulate more of them.
NOT_PERIODIC = -1


@kernel(allocates=True, entry=True)
def run_rows(
    g, t, duration_s, bytes_, latency_s, capacity, worker, n_workers,
    out, out_events, out_status, out_times_s, out_windows_s,
):  # fmt: skip
    """Simulate every ``n_workers``-th row from row ``worker`` on, and measure it or keep the times of its ops.

    The only entry of the simulation, so that it is compiled once.

    Parameters
    ----------
    g : Graph
    t : Tags
    duration_s, bytes_, latency_s, capacity : ndarrays of float64, shape (n_rows, number of ids)
    worker, n_workers : int
    out : ndarray of float64, shape (n_rows, N_MEASURES)
        Left alone when times are kept.
    out_events : ndarray of int64, shape (n_rows,)
        Instants simulated.
    out_status : ndarray of int64, shape (n_rows, 2)
        Status (OK, NOT_PERIODIC or an engine failure) and the op concerned.
    out_times_s : ndarray of float64, shape (n_rows, 2, n_ops) or (0, 2, n_ops)
        Start and end of every op; kept when there is room.
    out_windows_s : ndarray of float64, shape (n_rows, n_runs, 2) or (0, n_runs, 2)
        The last two first starts of every run, likewise.
    """
    w = make_workspace(g)
    keeps = len(out_times_s) > 0
    times_s = out_times_s if keeps else np.zeros((1, 2, len(g.op_kind)))
    windows_s = out_windows_s if keeps else np.zeros((1, len(t.runs), 2))
    scratch = np.zeros((4, scratch_width(g, t)))
    for row in range(worker, len(duration_s), n_workers):
        at = row if keeps else 0
        start_s, finish_s = times_s[at, 0], times_s[at, 1]
        c = Costs(duration_s[row], bytes_[row], latency_s[row], capacity[row])
        status = simulate(g, c, w, start_s, finish_s, out_status[row, 1:])
        out_events[row] = w.counter[N_EVENTS]
        out_status[row, 0] = status
        if status != OK:
            return  # the workspace is not clean; the caller gives up anyway
        for r in range(len(t.runs)):
            if not is_periodic(start_s, finish_s, t.runs[r], windows_s[at, r]):
                out_status[row, 0] = NOT_PERIODIC
        if out_status[row, 0] == OK and not keeps:
            measure(g, t, start_s, finish_s, windows_s[at], scratch, out[row])
