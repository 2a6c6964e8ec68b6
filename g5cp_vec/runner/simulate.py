"""Rows of costs through a template: the measures of many, or the times of every op of one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.cost.rows import CostRows
from g5cp_vec.engine.arrays import Costs, Graph, make_workspace
from g5cp_vec.engine.batch import NOT_PERIODIC, run_rows
from g5cp_vec.engine.fold import is_periodic
from g5cp_vec.engine.measure import N_MEASURES, Tags
from g5cp_vec.engine.schedule import simulate
from g5cp_vec.runner.status import raise_for_status
from g5cp_vec.runner.template import Chain, Template

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


def _run_chain(
    graph: Graph, tags: Tags, costs: CostRows, rows: NDArray[np.int64], jobs: int, done: Simulated
) -> NDArray[np.int64]:
    """Run some rows on one chain; return their statuses, shape (n_rows, 2)."""
    measures, n_events = np.zeros((len(rows), N_MEASURES)), np.zeros(len(rows), np.int64)
    status = np.zeros((len(rows), 2), np.int64)
    tables = (costs.duration_s[rows], costs.bytes[rows].astype(np.float64), costs.latency_s[rows], costs.capacity[rows])
    n_workers = min(jobs, len(rows))

    def work(worker: int) -> None:
        run_rows(graph, tags, *tables, worker, n_workers, measures, n_events, status)

    if n_workers == 1:
        work(0)
    else:
        with ThreadPoolExecutor(n_workers) as pool:  # the kernel releases the GIL
            list(pool.map(work, range(n_workers)))
    failed = np.flatnonzero(status[:, 0] > 0)
    if len(failed):
        raise_for_status(int(status[failed[0], 0]), status[failed[0], 1:], "simulation")
    done.measures[rows] = measures
    done.n_events[rows] = n_events
    return status


def _simulate_chain(chain: Chain, costs: CostRows, row: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    graph = chain.graph
    n_ops = len(graph.op_kind)
    start_s, finish_s, info = np.full(n_ops, np.nan), np.full(n_ops, np.nan), np.zeros(2, np.int64)
    workspace = make_workspace(graph)
    c = Costs(costs.duration_s[row], costs.bytes[row].astype(np.float64), costs.latency_s[row], costs.capacity[row])
    raise_for_status(simulate(graph, c, workspace, start_s, finish_s, info), info, "simulation")
    return start_s, finish_s


def simulate_point(template: Template, costs: CostRows, row: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return start and end of every op of the whole graph for one row (s), however little of it was simulated."""
    for fold in template.folds():
        chain = template.chain(fold)
        times = _simulate_chain(chain, costs, row)
        windows_s = np.zeros((len(chain.tags.runs), 2))
        if all(is_periodic(*times, run, windows_s[i]) for i, run in enumerate(chain.tags.runs)):
            break
    return template.expand(chain, times[0], windows_s), template.expand(chain, times[1], windows_s)
