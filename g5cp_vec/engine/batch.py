"""Many rows of costs through one graph, in parallel: one workspace per worker, one owner per output row.

A worker's rows depend on its number only, and no output is a sum over workers, so results are bit-identical for
any number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_EVENTS, OK, Costs, make_workspace
from g5cp_vec.engine.fold import is_periodic
from g5cp_vec.engine.measure import measure
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


@kernel(allocates=True, parallel=True)
def run_rows(g, t, duration_s, bytes_, latency_s, capacity, n_workers, out, out_events, out_status):
    """Simulate and measure every row.

    Parameters
    ----------
    g : Graph
    t : Tags
    duration_s, bytes_, latency_s, capacity : ndarrays of float64, shape (n_rows, number of ids)
    n_workers : int
        Workspaces to make; at most this many threads work at once.
    out : ndarray of float64, shape (n_rows, N_MEASURES)
    out_events : ndarray of int64, shape (n_rows,)
        Instants simulated.
    out_status : ndarray of int64, shape (n_rows, 2)
        Status (OK, NOT_PERIODIC or an engine failure) and the op concerned.
    """
    n_rows = len(duration_s)
    n_ops, n_chips = len(g.op_kind), len(g.chip_indptr) - 1
    for worker in prange(n_workers):
        w = make_workspace(n_ops, n_chips, len(g.link_capacity), len(g.route_indices))
        start_s, finish_s = np.zeros(n_ops), np.zeros(n_ops)
        windows_s, scratch = np.zeros((len(t.runs), 2)), np.zeros((4, 2 * n_ops))
        info = np.zeros(2, np.int64)
        for row in range(worker, n_rows, n_workers):
            c = Costs(duration_s[row], bytes_[row], latency_s[row], capacity[row])
            out_status[row, 0] = run_row(g, t, c, w, start_s, finish_s, windows_s, scratch, out[row], info)
            out_status[row, 1] = info[0]
            out_events[row] = w.count[N_EVENTS]
