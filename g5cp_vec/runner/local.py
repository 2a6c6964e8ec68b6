"""Parts are computed on this machine: a template per structure, its rows in parallel threads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from g5cp_vec.audit.conservation import audit
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import Expansion
from g5cp_vec.cost.math_path import math_times
from g5cp_vec.cost.rows import CostRows, cost_rows
from g5cp_vec.engine.measure import MAKESPAN_S
from g5cp_vec.errors import SimulationError
from g5cp_vec.mapping.load import Load, build_load
from g5cp_vec.mapping.structure import build_structure
from g5cp_vec.runner import results
from g5cp_vec.runner.plan import Batch, Plan, Slice, row_reach
from g5cp_vec.runner.results import Columns
from g5cp_vec.runner.schema import KPIS
from g5cp_vec.runner.simulate import simulate_point, simulate_rows
from g5cp_vec.runner.template import Template


class Point(NamedTuple):
    """Load keys of some rows, arrays of shape (n_rows,)."""

    seq_len: NDArray[np.int64]
    batch: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]


class LocalRunner:
    """Computes the parts of a plan.

    Parameters
    ----------
    expansion : Expansion
    plan : Plan
    fidelity : {"exact", "full"}
        Whether symmetry and repetition are used; the results are the same.
    jobs : int
        Threads.
    on_progress : callable
        Called with the number of rows finished since the last call.
    """

    def __init__(
        self,
        expansion: Expansion,
        plan: Plan,
        fidelity: str = "exact",
        jobs: int = 1,
        on_progress: Callable[[int], None] = lambda n: None,
    ) -> None:
        self.expansion = expansion
        self.plan = plan
        self.fidelity = fidelity
        self.jobs = jobs
        self.on_progress = on_progress
        self._template: tuple[Hashable, Template] | None = None

    def run_part(self, part: list[Batch]) -> pl.DataFrame:
        """Return the results of one part, rows in the order of the plan."""
        pieces: list[tuple[int, Columns]] = []
        for batch in part:
            if batch.kind == "g5":
                pieces += self._run_simulated(batch)
            else:
                for s in batch.slices:
                    columns = self._invalid(s) if batch.kind == "invalid" else self._run_math(s)
                    pieces.append((len(s.rows), columns))
                    self.on_progress(len(s.rows))
        rows = np.concatenate([s.rows for batch in part for s in batch.slices])
        return results.assemble(pieces, self.expansion.keys_of(rows))

    def _loads(self, rows: NDArray[np.int64]) -> Point:
        e = self.expansion
        return Point(e.seq_len[rows], e.batch[rows], e.cached_tokens[rows])

    def _identity(self, s: Slice) -> Columns:
        dep, loads = self.expansion.deployments[s.deployment], self._loads(s.rows)
        digest = dep.digest if isinstance(dep, Deployment) else _reason_digest(self.expansion, s.deployment)
        return {"point_id": results.point_ids(digest, tuple(loads)), "row": self.expansion.row[s.rows]}

    def _invalid(self, s: Slice) -> Columns:
        reasons = np.array(self.expansion.reasons, dtype=object)[self.expansion.reason_code[s.rows]]
        return {**self._identity(s), "status": ["invalid"] * len(s.rows), "reason": list(reasons)}

    def _deployment(self, s: Slice) -> tuple[Deployment, Point, Load]:
        dep = self.expansion.deployments[s.deployment]
        assert isinstance(dep, Deployment)
        point = self._loads(s.rows)
        return dep, point, build_load(dep, *point)

    def _common(self, s: Slice, step_s: NDArray[np.float64]) -> Columns:
        dep, point, load = self._deployment(s)
        return {
            **self._identity(s),
            **results.memory_columns(dep, *point),
            **results.step_columns(dep, load, step_s),
        }

    def _run_math(self, s: Slice) -> Columns:
        dep, _, load = self._deployment(s)
        times = math_times(dep, self.plan.networks[s.deployment], load, len(s.rows))
        return {**self._common(s, times.step_s), **results.math_columns(dep, times, len(s.rows))}

    def template(self, batch: Batch) -> Template:
        """Return the template of a batch; the last one is kept, as a batch may continue in the next part."""
        if self._template is None or self._template[0] != batch.key:
            self._template = None  # freed before the next is built
            first = batch.slices[0]
            dep, _, _ = self._deployment(first)
            (reach,) = row_reach(dep, self.expansion, first.rows[:1]).tolist()
            structure = build_structure(dep, self.plan.networks[first.deployment], reach)
            self._template = (batch.key, Template(structure, reduced=self.fidelity == "exact"))
        return self._template[1]

    def _run_simulated(self, batch: Batch) -> list[tuple[int, Columns]]:
        template = self.template(batch)
        costs = [self._costs(template, s) for s in batch.slices]
        joined = CostRows(*(np.concatenate(column) for column in zip(*costs, strict=True)))
        simulated = simulate_rows(template, joined, self.jobs, self.on_progress)
        pieces = []
        begin = 0
        for s, rows in zip(batch.slices, costs, strict=True):
            end = begin + len(s.rows)
            dep, _, _ = self._deployment(s)
            measures = simulated.measures[begin:end]
            step_s = measures[:, MAKESPAN_S]
            columns = {
                **self._common(s, step_s),
                **results.simulated_columns(dep, self.plan.networks[s.deployment], template, measures, rows.duration_s),
                **results.traffic_columns(dep, template, rows.bytes, rows.capacity, step_s),
                "n_ops": np.full(len(s.rows), template.n_ops),
                "n_ops_simulated": simulated.n_ops[begin:end],
                "n_events": simulated.n_events[begin:end],
                **self._audit(template, s, rows, step_s),
            }
            pieces.append((len(s.rows), columns))
            begin = end
        return pieces

    def _costs(self, template: Template, s: Slice) -> CostRows:
        dep, _, load = self._deployment(s)
        return cost_rows(dep, template.structure.keys, self.plan.networks[s.deployment], load, len(s.rows))

    def _audit(self, template: Template, s: Slice, rows: CostRows, step_s: NDArray[np.float64]) -> Columns:
        """Audit the chosen rows of a slice: simulate each once more, keeping the times of every op."""
        columns: dict[str, list[int | None]] = {name: [None] * len(s.rows) for name in KPIS}
        dep, point, _ = self._deployment(s)
        for i in np.flatnonzero(self.plan.audited[s.rows]):
            start_s, finish_s = simulate_point(template, rows, int(i))
            # What is audited must be what is reported.
            if abs(finish_s.max() - step_s[i]) > 1e-12 * step_s[i]:
                raise SimulationError(f"step_s: {step_s[i]!r} reported, but the ops end at {finish_s.max()!r}")
            load = (int(point.seq_len[i]), int(point.batch[i]), int(point.cached_tokens[i]))
            kpis = audit(dep, template.structure, *load, start_s, finish_s)
            for name in KPIS:
                columns[name][i] = min(getattr(kpis, name), 2**63 - 1)
        return dict(columns)


def _reason_digest(expansion: Expansion, deployment: int) -> int:
    """Identity of a combination that cannot be deployed: what was written, files by their contents."""
    written = (expansion.deployment_keys.row(deployment), expansion.fingerprints[deployment])
    return int.from_bytes(hashlib.sha256(repr(written).encode()).digest()[:8], "big")
