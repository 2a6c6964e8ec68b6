"""Many rows of costs through one graph: the part of them that falls to one worker.

Workers are threads of the caller's, each with its own workspace; a worker owns every ``n_workers``-th row and no
output is a sum over rows, so results are bit-identical for any number of them.
"""

from __future__ import annotations

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_EVENTS, OK, RECORDS, Costs, Instants, finish_s, start_s
from g5cp_vec.engine.fold import is_periodic
from g5cp_vec.engine.measure import measure
from g5cp_vec.engine.playback import N_INSTANTS, find_tape, free_tape, keep_tape, recorder_of, take_turn
from g5cp_vec.engine.schedule import simulate

# Beside the engine's own statuses: a run left out units although it is not periodic; simulate more of them.
NOT_PERIODIC = -1


@kernel(entry=True)
def run_rows(
    g, t, w, shelf, scratch, duration_s, bytes_, latency_s, capacity, worker, n_workers,
    out, out_events, out_status, out_times_s, out_windows_s,
):  # fmt: skip
    """Simulate every ``n_workers``-th row from row ``worker`` on, and measure it or keep the times of its ops.

    The only entry of the simulation, so that it is compiled once.

    Parameters
    ----------
    g : Graph
    t : Tags
    w : Workspace
    shelf : Shelf
    scratch : ndarray of float64, from `make_scratch`
    duration_s, bytes_, latency_s, capacity : ndarrays of float64, shape (n_rows, number of ids)
    worker, n_workers : int
    out : ndarray of float64, shape (n_rows, N_MEASURES)
        Left alone when times are kept.
    out_events : ndarray of int64, shape (n_rows,)
        Instants of each row but the first, simulated or played.
    out_status : ndarray of int64, shape (n_rows, 2), zeros
        Status (OK, NOT_PERIODIC or an engine failure) and the op concerned.
    out_times_s : ndarray of float64, shape (n_rows, 2, n_ops) or (0, 2, n_ops)
        Start and end of every op; kept when there is room.
    out_windows_s : ndarray of float64, shape (n_rows, n_runs, 2) or (1, n_runs, 2)
        The last two first starts of every run, likewise, or scratch.
    """
    n_rows, n_ops = len(duration_s), len(g.op_kind)
    table = Costs(duration_s, bytes_, latency_s, capacity)
    keeps = len(out_times_s) > 0
    for row in range(worker, n_rows, n_workers):
        records = take_turn(shelf)
        tape = find_tape(shelf, table, row, w.instant_s) if records else -1
        if tape >= 0:
            n_instants = shelf.tape[tape, N_INSTANTS]
            end_s = w.instant_s[shelf.order[tape, n_instants - 1]]
            times = Instants(w.instant_s[:n_instants], end_s, shelf.at[tape])
        else:
            w.counter[RECORDS] = records
            tape = free_tape(shelf) if records else 0
            costs = Costs(duration_s[row], bytes_[row], latency_s[row], capacity[row])
            status = simulate(g, costs, w, recorder_of(shelf, tape), out_status[row, 1:])
            if status != OK:
                out_status[row, 0] = status
                return  # the workspace is not clean; the caller gives up anyway
            if w.counter[RECORDS] > 0:
                keep_tape(shelf, w, tape, row)
            last = w.counter[N_EVENTS]
            times = Instants(w.instant_s[: last + 1], w.instant_s[last], w.at)
        out_events[row] = len(times.instant_s) - 1
        at = row if keeps else 0
        for run in range(len(t.runs)):
            if not is_periodic(times, t.runs[run], out_windows_s[at, run]):
                out_status[row, 0] = NOT_PERIODIC
        if keeps:
            for op in range(n_ops):
                out_times_s[row, 0, op] = start_s(times, op)
                out_times_s[row, 1, op] = finish_s(times, op)
        elif out_status[row, 0] == OK:
            measure(g, t, times, out_windows_s[at], scratch, out[row])
