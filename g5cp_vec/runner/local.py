"""Parts are computed on this machine: a template per structure, its rows in parallel threads."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from g5cp_vec.config.collectives import BEST
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import Expansion
from g5cp_vec.cost.calls import open_groups
from g5cp_vec.cost.math_path import math_times
from g5cp_vec.cost.rows import CostRows, Coverage, Parts, cost_rows, coverage, fixed_rows, parts_by_key
from g5cp_vec.cost.wires import unmeasured_collectives
from g5cp_vec.engine.measure import MAKESPAN_S
from g5cp_vec.mapping.graph import CostKeys
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.structure import build_structure
from g5cp_vec.runner import results
from g5cp_vec.runner.apart import are_apart, run_apart
from g5cp_vec.runner.audited import audit_pass
from g5cp_vec.runner.choice import Pieces, run_best
from g5cp_vec.runner.passes import Passes, split_passes
from g5cp_vec.runner.plan import Batch, Plan, Slice, points, row_reach
from g5cp_vec.runner.results import Columns
from g5cp_vec.runner.schema import KPIS
from g5cp_vec.runner.simulate import Simulated, simulate_rows
from g5cp_vec.runner.template import Template


class Priced(NamedTuple):
    """What the computes and messages of a slice cost: rows for the kernel, what is fixed, how far it is measured."""

    costs: CostRows
    fixed_s: NDArray[np.float64]
    covered: Coverage | None


# What a batch needs to be simulated.
Prepared = tuple[Template, list[Priced]]


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
        pieces: Pieces = []
        for batch in part:
            if batch.kind == "g5":
                continue
            for s in batch.slices:
                columns = self._invalid(s) if batch.kind == "invalid" else self._run_math(s)
                pieces.append((len(s.rows), columns))
                self.on_progress(len(s.rows))
        # Simulated batches come last in a part.
        pieces += self._run_batches([batch for batch in part if batch.kind == "g5"])
        rows = np.concatenate([s.rows for batch in part for s in batch.slices])
        return results.assemble(pieces, self.expansion.keys_of(rows))

    def _run_batches(self, batches: list[Batch]) -> Pieces:
        """Simulate batches one after another.

        With several threads, one more prepares the next batch and finishes the last while the kernel, which needs no
        interpreter, runs this one; but not for what takes more than one simulation, and not where templates are of
        every rank: two of them may not fit.
        """
        if self.jobs == 1 or self.fidelity != "exact":
            return [piece for batch in batches for piece in self._run_batch(batch)]
        beside = ThreadPoolExecutor(1)
        try:
            finished: list[Future[Pieces]] = []
            upcoming: Future[Prepared] | None = None
            for batch, following in itertools.zip_longest(batches, batches[1:]):
                if not self._is_one_simulation(batch):
                    finished.append(Future())
                    finished[-1].set_result(self._run_batch(batch))
                    continue
                prepared = (upcoming or beside.submit(self._prepare, batch)).result()
                upcoming = None
                if following is not None and self._is_one_simulation(following):
                    upcoming = beside.submit(self._prepare, following)
                simulated = self._simulate(batch, *prepared, self.on_progress)
                finished.append(beside.submit(self._finish, batch, *prepared, simulated))
            return [piece for future in finished for piece in future.result()]
        finally:
            beside.shutdown(cancel_futures=True)  # an interrupt waits for what is under way, not for what is to come

    def _is_one_simulation(self, batch: Batch) -> bool:
        open_choice = self._deployment(batch.slices[0])[0].collective == BEST
        return not open_choice and not any(are_apart(*self._deployment(s)) for s in batch.slices)

    def _identity(self, s: Slice) -> Columns:
        dep, loads = self.expansion.deployments[s.deployment], points(self.expansion, s.rows)
        digest = dep.digest if isinstance(dep, Deployment) else _reason_digest(self.expansion, s.deployment)
        return {"point_id": results.point_ids(digest, tuple(loads)), "row": self.expansion.row[s.rows]}

    def _invalid(self, s: Slice) -> Columns:
        reasons = np.array(self.expansion.reasons, dtype=object)[self.expansion.reason_code[s.rows]]
        return {**self._identity(s), "status": ["invalid"] * len(s.rows), "reason": list(reasons)}

    def _deployment(self, s: Slice) -> tuple[Deployment, Passes]:
        dep = self.expansion.deployments[s.deployment]
        assert isinstance(dep, Deployment)
        return dep, split_passes(dep, points(self.expansion, s.rows))

    def _common(
        self, s: Slice, step_s: NDArray[np.float64], covered: Coverage | None, keys: CostKeys | None = None
    ) -> Columns:
        dep, passes = self._deployment(s)
        point, network = points(self.expansion, s.rows), self.plan.networks[s.deployment]
        unmeasured = [] if keys is None else unmeasured_collectives(dep, network, keys.bytes)
        return {
            **self._identity(s),
            **results.memory_columns(dep, point, passes),
            **results.calibration_columns(dep, passes, covered, unmeasured),
            **results.step_columns(dep, point, passes, step_s),
        }

    def _run_math(self, s: Slice) -> Columns:
        dep, passes = self._deployment(s)
        n_passes = len(passes.seq_len)
        times = math_times(dep, self.plan.networks[s.deployment], build_load(dep, *passes.load), n_passes)
        columns = results.over_passes(results.math_columns(dep, times, n_passes), passes)
        return {**self._common(s, passes.sum(times.step_s), self._coverage(s, None)), **columns}

    def template(self, batch: Batch, collective: str | None = None) -> Template:
        """Return the template of a batch; the last one is kept, as a batch may continue in the next part."""
        key = (batch.key, collective)
        if self._template is None or self._template[0] != key:
            self._template = None  # freed before the next is built
            first = batch.slices[0]
            dep = self._simulated_deployment(first, collective)
            (reach,) = row_reach(dep, self.expansion, first.rows[:1]).tolist()
            reduced = self.fidelity == "exact"
            structure = build_structure(dep, self.plan.networks[first.deployment], reach, symmetric=reduced)
            self._template = (key, Template(structure, reduced=reduced))
        return self._template[1]

    def _simulated_deployment(self, s: Slice, collective: str | None) -> Deployment:
        """Return the deployment of a slice, its collectives by one algorithm where it leaves that open."""
        dep, _ = self._deployment(s)
        return dep if collective is None else dataclasses.replace(dep, collective=collective)

    def _run_batch(self, batch: Batch) -> Pieces:
        """Simulate a batch; with ``collective = "best"`` by several algorithms, and every row takes the fastest."""
        dep, _ = self._deployment(batch.slices[0])
        if dep.collective != BEST:
            return self._run_simulated(batch, None, self.on_progress)[0]
        pieces = run_best(batch, self._run_simulated)
        self.on_progress(batch.n_rows)
        return pieces

    def _run_simulated(
        self, batch: Batch, collective: str | None, on_progress: Callable[[int], None] = lambda n: None
    ) -> tuple[Pieces, tuple[str, ...]]:
        """Return the columns of a batch, and the kinds of groups whose collectives have a choice of algorithms."""
        dep, _ = self._deployment(batch.slices[0])
        if any(are_apart(*self._deployment(s)) for s in batch.slices):
            apart = [self._run_apart(s, collective, on_progress) for s in batch.slices]
            messages = {key for _, _, keys in apart for key in keys.bytes}
            return [(n, columns) for n, columns, _ in apart], open_groups(dep, messages)
        template, priced = self._prepare(batch, collective)
        pieces = self._finish(batch, template, priced, self._simulate(batch, template, priced, on_progress), collective)
        return pieces, open_groups(dep, template.structure.keys.bytes)

    def _prepare(self, batch: Batch, collective: str | None = None) -> Prepared:
        template = self.template(batch, collective)
        template.chain(template.folds()[0])
        return template, [self._price(template, s) for s in batch.slices]

    def _simulate(
        self, batch: Batch, template: Template, priced: list[Priced], on_progress: Callable[[int], None]
    ) -> Simulated:
        joined = CostRows(*(np.concatenate(column) for column in zip(*(p.costs for p in priced), strict=True)))
        # Rows are counted as they are simulated, but those of several passes when all of the batch are.
        if len(joined.duration_s) == batch.n_rows:
            return simulate_rows(template, joined, self.jobs, on_progress)
        simulated = simulate_rows(template, joined, self.jobs)
        on_progress(batch.n_rows)
        return simulated

    def _finish(
        self,
        batch: Batch,
        template: Template,
        priced: list[Priced],
        simulated: Simulated,
        collective: str | None = None,
    ) -> Pieces:
        pieces = []
        begin = 0
        for s, rows in zip(batch.slices, priced, strict=True):
            end = begin + len(rows.costs.duration_s)
            of_slice = slice(begin, end)
            part = Simulated(simulated.measures[of_slice], simulated.n_events[of_slice], simulated.n_ops[of_slice])
            pieces.append((len(s.rows), self._simulated(template, s, rows, part, collective)))
            begin = end
        return pieces

    def _run_apart(
        self, s: Slice, collective: str | None, on_progress: Callable[[int], None]
    ) -> tuple[int, Columns, CostKeys]:
        """Simulate rows with passes that differ in structure."""
        _, passes = self._deployment(s)
        columns, step_s, keys = run_apart(
            self._simulated_deployment(s, collective), self.plan.networks[s.deployment], passes,
            self.plan.audited[s.rows], reduced=self.fidelity == "exact", jobs=self.jobs,
        )  # fmt: skip
        on_progress(len(s.rows))
        return len(s.rows), {**self._common(s, step_s, self._coverage(s, keys), keys), **columns}, keys

    def _simulated(
        self, template: Template, s: Slice, priced: Priced, simulated: Simulated, collective: str | None
    ) -> Columns:
        """Return the columns of a slice from the costs and the measures of its passes."""
        dep, passes = self._deployment(s)
        network, costs = self.plan.networks[s.deployment], priced.costs
        of_passes = {
            **results.simulated_columns(dep, network, template, simulated.measures, costs.duration_s, priced.fixed_s),
            "n_ops": np.full(len(passes.seq_len), template.n_ops),
            "n_ops_simulated": simulated.n_ops,
            "n_events": simulated.n_events,
        }
        pass_s = simulated.measures[:, MAKESPAN_S]
        step_s = passes.sum(pass_s)
        sent = passes.sum(costs.bytes)
        return {
            **self._common(s, step_s, priced.covered, template.structure.keys),
            **results.over_passes(of_passes, passes),
            **results.traffic_columns(dep, template, sent, costs.capacity[passes.first], step_s),
            **self._audit(template, s, costs, pass_s, collective),
        }

    def _price(self, template: Template, s: Slice) -> Priced:
        dep, passes = self._deployment(s)
        load, n_passes, keys = build_load(dep, *passes.load), len(passes.seq_len), template.structure.keys
        parts = parts_by_key(dep, load)
        return Priced(
            cost_rows(dep, keys, self.plan.networks[s.deployment], load, n_passes, parts),
            fixed_rows(dep, keys, load, n_passes, parts),
            self._coverage(s, keys, parts),
        )

    def _coverage(self, s: Slice, keys: CostKeys | None, parts: Parts | None = None) -> Coverage | None:
        """Return how far a slice is measured, as ops of a structure with ``keys`` or, with None, in closed form."""
        dep, passes = self._deployment(s)
        if dep.chip.calibration is None:
            return None
        return coverage(dep, build_load(dep, *passes.load), len(passes.seq_len), keys, parts)

    def _audit(
        self, template: Template, s: Slice, costs: CostRows, pass_s: NDArray[np.float64], collective: str | None
    ) -> Columns:
        """Audit every pass of the chosen rows of a slice."""
        columns: dict[str, list[int | None]] = {name: [None] * len(s.rows) for name in KPIS}
        _, passes = self._deployment(s)
        dep = self._simulated_deployment(s, collective)
        for row in np.flatnonzero(self.plan.audited[s.rows]):
            total = dict.fromkeys(KPIS, 0)
            for i in passes.of_row(row):
                kpis = audit_pass(dep, template, costs, i, passes, i, pass_s[i])
                total = {name: total[name] + getattr(kpis, name) for name in KPIS}
            for name in KPIS:
                columns[name][row] = min(total[name], 2**63 - 1)
        return dict(columns)


def _reason_digest(expansion: Expansion, deployment: int) -> int:
    """Identity of a combination that cannot be deployed: what was written, files by their contents."""
    written = (expansion.deployment_keys.row(deployment), expansion.fingerprints[deployment])
    return int.from_bytes(hashlib.sha256(repr(written).encode()).digest()[:8], "big")
