"""One graph, run over and over; the only place of the benchmarks that calls the kernel itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from workloads import Workload

from g5cp_vec.engine._jit import kernel
from g5cp_vec.engine.arrays import N_EVENTS, N_LINK_VISITS, N_SOLVES, make_workspace
from g5cp_vec.engine.schedule import simulate
from g5cp_vec.engine.tape import make_recorder
from g5cp_vec.runner.status import raise_for_status


@kernel(entry=True)
def _simulate(g, c, w, r, info):
    return simulate(g, c, w, r, info)


class Simulation:
    """A workload with its workspace, and the instants of its last run.

    Parameters
    ----------
    workload : Workload
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._info = np.zeros(2, np.int64)
        self._workspace = make_workspace(workload.graph)
        self._recorder = make_recorder(workload.graph, records=False)

    def run(self) -> None:
        """Simulate once."""
        g, c = self.workload
        status = _simulate(g, c, self._workspace, self._recorder, self._info)
        raise_for_status(status, self._info, "benchmark")

    @property
    def start_s(self) -> NDArray[np.float64]:
        """Start of every op in the last run."""
        start_s: NDArray[np.float64] = self._workspace.instant_s[self._workspace.at["start"]]
        return start_s

    @property
    def finish_s(self) -> NDArray[np.float64]:
        """End of every op in the last run."""
        finish_s: NDArray[np.float64] = self._workspace.instant_s[self._workspace.at["finish"]]
        return finish_s

    @property
    def makespan_s(self) -> float:
        """Last end of the last run."""
        return float(self._workspace.instant_s[self._workspace.counter[N_EVENTS]])

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
