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


@kernel
def run_row(g, t, c, w, start_s, finish_s, windows_s, scratch, out, info):
    """Simulate and measure one row; status as in `simulate`, or NOT_PERIODIC."""
    status = simulate(g, c, w, start_s, finish_s, info)
    if status != OK:
        return status
    for r in range(len(t.runs)):
        if not is_periodic(start_s, finish_s, t.runs[r], windows_s[r]):
            return NOT_PERIODIC
    measure(g, t, start_s, finish_s, windows_s, scratch, out)
    return OK


@kernel(allocates=True, entry=True)
def run_rows(g, t, duration_s, bytes_, latency_s, capacity, worker, n_workers, out, out_events, out_status):
    """Simulate and measure every ``n_workers``-th row from row ``worker`` on.

    Parameters
    ----------
    g : Graph
    t : Tags
    duration_s, bytes_, latency_s, capacity : ndarrays of float64, shape (n_rows, number of ids)
    worker, n_workers : int
    out : ndarray of float64, shape (n_rows, N_MEASURES)
    out_events : ndarray of int64, shape (n_rows,)
        Instants simulated.
    out_status : ndarray of int64, shape (n_rows, 2)
        Status (OK, NOT_PERIODIC or an engine failure) and the op concerned.
    """
    n_ops = len(g.op_kind)
    w = make_workspace(g)
    start_s, finish_s = np.zeros(n_ops), np.zeros(n_ops)
    windows_s, scratch = np.zeros((len(t.runs), 2)), np.zeros((4, scratch_width(g, t)))
    info = np.zeros(2, np.int64)
    for row in range(worker, len(duration_s), n_workers):
        c = Costs(duration_s[row], bytes_[row], latency_s[row], capacity[row])
        out_status[row, 0] = run_row(g, t, c, w, start_s, finish_s, windows_s, scratch, out[row], info)
        out_status[row, 1] = info[0]
        out_events[row] = w.counter[N_EVENTS]
        if out_status[row, 0] > OK:
            return  # the workspace is not clean; the caller gives up anyway
