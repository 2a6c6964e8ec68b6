"""One graph, run over and over; the only place of the benchmarks that calls the kernel itself."""

from __future__ import annotations

import numpy as np
from workloads import Workload

from g5cp_vec.engine.arrays import N_EVENTS, N_LINK_VISITS, N_SOLVES, make_workspace
from g5cp_vec.engine.schedule import simulate
from g5cp_vec.runner.status import raise_for_status


class Simulation:
    """A workload with its workspace, and the times of its last run.

    Parameters
    ----------
    workload : Workload

    Attributes
    ----------
    start_s, finish_s : ndarrays of float64, shape (n_ops,)
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        n_ops = workload.n_ops
        self.start_s, self.finish_s = np.zeros(n_ops), np.zeros(n_ops)
        self._info = np.zeros(2, np.int64)
        self._workspace = make_workspace(workload.graph)

    def run(self) -> None:
        """Simulate once."""
        g, c = self.workload
        status = simulate(g, c, self._workspace, self.start_s, self.finish_s, self._info)
        raise_for_status(status, self._info, "benchmark")

    @property
    def makespan_s(self) -> float:
        """Last end of the last run."""
        return float(self.finish_s.max())

    @property
    def counters(self) -> dict[str, int]:
        """What the last run had to do; the same on every machine."""
        count = self._workspace.counter
        return {
            "n_ops": self.workload.n_ops,
            "n_events": int(count[N_EVENTS]),
            "n_solves": int(count[N_SOLVES]),
            "n_link_visits": int(count[N_LINK_VISITS]),
        }
