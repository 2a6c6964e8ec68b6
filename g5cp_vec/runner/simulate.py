"""Rows of costs through a template: the measures of many, or the times of every op of one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.cost.rows import CostRows
from g5cp_vec.engine.arrays import Graph, make_workspace
from g5cp_vec.engine.batch import NOT_PERIODIC, run_rows
from g5cp_vec.engine.measure import N_MEASURES, Tags, make_scratch
from g5cp_vec.engine.playback import make_shelf
from g5cp_vec.runner.status import raise_for_status
from g5cp_vec.runner.template import Template

# Ops simulated between two looks at the progress bar and at the keyboard.
OPS_PER_CALL = 2 * 10**7


class Simulated(NamedTuple):
    """What the kernel says of rows: measures (n_rows, N_MEASURES), instants and ops simulated (n_rows,)."""

    measures: NDArray[np.float64]
    n_events: NDArray[np.int64]
    n_ops: NDArray[np.int64]


def simulate_rows(
    template: Template, costs: CostRows, jobs: int = 1, on_progress: Callable[[int], None] = lambda n: None
) -> Simulated:
    """Run rows through the kernel, each on the shortest chain on which its layers are periodic."""
    n_rows = len(costs.duration_s)
    done = Simulated(np.zeros((n_rows, N_MEASURES)), np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64))
    left = np.arange(n_rows)
    for fold in template.folds():
        chain = template.chain(fold)
        n_ops = len(chain.tags.op_role)
        per_call = max(jobs, OPS_PER_CALL // max(n_ops, 1))
        again = []
        for begin in range(0, len(left), per_call):
            rows = left[begin : begin + per_call]
            status = _run_chain(chain.graph, chain.tags, costs, rows, jobs, done)
            failed = rows[status[:, 0] == NOT_PERIODIC]
            done.n_ops[rows] = n_ops
            again.append(failed)
            on_progress(len(rows) - len(failed))
        left = np.concatenate(again)
        if len(left) == 0:
            break
    return done


class Times(NamedTuple):
    """Start and end of every op of every row (n_rows, 2, n_ops), and the window of every run (n_rows, n_runs, 2)."""

    times_s: NDArray[np.float64]
    windows_s: NDArray[np.float64]


def run_graph(
    graph: Graph, tags: Tags, tables: tuple[NDArray[np.float64], ...], jobs: int = 1, *, keep_times: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], Times]:
    """Run rows of costs through one graph: the only call of the kernel.

    Parameters
    ----------
    tables : tuple of ndarrays of float64
        Columns of `Costs`, each of shape (n_rows, number of ids).
    keep_times : bool
        Whether the times of every op are wanted, instead of measures.

    Returns
    -------
    measures : ndarray of float64, shape (n_rows, N_MEASURES)
        Zeros when times are kept.
    n_events : ndarray of int64, shape (n_rows,)
    status : ndarray of int64, shape (n_rows, 2)
        OK, NOT_PERIODIC or an engine failure, and the op that failed.
    times : Times
        Of no rows when they are not wanted.
    """
    n_rows = len(tables[0])
    measures, n_events = np.zeros((n_rows, N_MEASURES)), np.zeros(n_rows, np.int64)
    status = np.zeros((n_rows, 2), np.int64)
    n_kept = n_rows if keep_times else 0
    n_ops = len(graph.op_kind)
    times = Times(np.zeros((n_kept, 2, n_ops)), np.zeros((n_kept, len(tags.runs), 2)))
    n_workers = min(jobs, n_rows)

    def work(worker: int) -> None:
        shelf = make_shelf(graph, len(range(worker, n_rows, n_workers)))
        scratch = make_workspace(graph), shelf, make_scratch(graph, tags)
        windows_s = times.windows_s if keep_times else np.zeros((1, len(tags.runs), 2))
        out = measures, n_events, status, times.times_s, windows_s
        run_rows(graph, tags, *scratch, *tables, worker, n_workers, *out)

    if n_workers == 1:
        work(0)
    else:
        with ThreadPoolExecutor(n_workers) as pool:  # the kernel releases the GIL
            list(pool.map(work, range(n_workers)))
    return measures, n_events, status, times


def _tables(costs: CostRows, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
    return costs.duration_s[rows], costs.wire_bytes[rows], costs.latency_s[rows], costs.capacity[rows]


def _raise_for_rows(status: NDArray[np.int64]) -> None:
    failed = np.flatnonzero(status[:, 0] > 0)
    if len(failed):
        raise_for_status(int(status[failed[0], 0]), status[failed[0], 1:], "simulation")


def _run_chain(
    graph: Graph, tags: Tags, costs: CostRows, rows: NDArray[np.int64], jobs: int, done: Simulated
) -> NDArray[np.int64]:
    """Run some rows on one chain; return their statuses, shape (n_rows, 2)."""
    measures, n_events, status, _ = run_graph(graph, tags, _tables(costs, rows), jobs)
    _raise_for_rows(status)
    done.measures[rows] = measures
    done.n_events[rows] = n_events
    return status


def simulate_point(template: Template, costs: CostRows, row: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return start and end of every op of the whole graph for one row (s), however little of it was simulated."""
    for fold in template.folds():
        chain = template.chain(fold)
        _, _, status, times = run_graph(chain.graph, chain.tags, _tables(costs, np.array([row])), keep_times=True)
        _raise_for_rows(status)
        if status[0, 0] != NOT_PERIODIC:
            break
    start_s, finish_s = times.times_s[0]
    return template.expand(chain, start_s, times.windows_s[0]), template.expand(chain, finish_s, times.windows_s[0])
