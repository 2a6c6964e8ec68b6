"""Many rows of costs through one graph, in parallel: one workspace per worker, one owner per output row.

A worker's rows depend on its number only, and no output is a sum over workers, so results are bit-identical for
any number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_EVENTS, OK, Costs, make_workspace
from g5cp_vec.engine.measure import measure
from g5cp_vec.engine.schedule import simulate


@kernel(allocates=True, parallel=True)
def run_rows(g, op_src, op_dst, op_role, duration_s, bytes_, latency_s, capacity, n_workers, out, out_events, out_info):
    """Simulate and measure every row.

    Parameters
    ----------
    g : Graph
    op_src, op_dst, op_role
        See `g5cp_vec.engine.measure.measure`.
    duration_s, bytes_, latency_s, capacity : ndarrays of float64, shape (n_rows, number of ids)
    n_workers : int
        Workspaces to make; at most this many threads work at once.
    out : ndarray of float64, shape (n_rows, N_MEASURES)
    out_events : ndarray of int64, shape (n_rows,)
        Instants simulated.
    out_info : ndarray of int64, shape (n_rows, 2)
        On failure: status, op.
    """
    n_rows = len(duration_s)
    n_ops, n_chips = len(g.op_kind), len(g.chip_indptr) - 1
    for worker in prange(n_workers):
        w = make_workspace(n_ops, n_chips, len(g.link_capacity), len(g.route_indices))
        start_s, finish_s = np.zeros(n_ops), np.zeros(n_ops)
        info = np.zeros(2, np.int64)
        for row in range(worker, n_rows, n_workers):
            c = Costs(duration_s[row], bytes_[row], latency_s[row], capacity[row])
            status = simulate(g, c, w, start_s, finish_s, info)
            out_events[row] = w.count[N_EVENTS]
            if status == OK:
                measure(g, op_src, op_dst, op_role, c.duration_s, start_s, finish_s, out[row])
            else:
                out_info[row, 0] = status
                out_info[row, 1] = info[0]
