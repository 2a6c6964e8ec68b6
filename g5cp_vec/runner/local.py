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

from g5cp_vec.config._record import Record
from g5cp_vec.config.collectives import BEST
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import Expansion
from g5cp_vec.cost.calls import open_groups
from g5cp_vec.cost.math_path import math_times
from g5cp_vec.cost.rows import Computes, CostRows, Coverage, cost_rows, coverage, fixed_rows, price_computes
from g5cp_vec.cost.wires import unmeasured_collectives
from g5cp_vec.engine.measure import MAKESPAN_S
from g5cp_vec.mapping.graph import CostKeys, split_rate
from g5cp_vec.mapping.load import Load, build_load
from g5cp_vec.mapping.structure import build_structure
from g5cp_vec.runner import results
from g5cp_vec.runner.apart import are_apart, run_apart
from g5cp_vec.runner.audited import audit_pass
from g5cp_vec.runner.choice import Groups, Pieces, run_best
from g5cp_vec.runner.memo import Memo
from g5cp_vec.runner.passes import Passes, Point, split_passes
from g5cp_vec.runner.plan import Batch, Plan, Slice, points, row_reach
from g5cp_vec.runner.results import Columns, Useful
from g5cp_vec.runner.schema import KPIS
from g5cp_vec.runner.simulate import Simulated, simulate_rows
from g5cp_vec.runner.template import Template

# Rows whose durations and memory are remembered for deployments to come that differ in the network only.
ROWS_REMEMBERED = 2**18
ALIKE_FIELDS = tuple(
    field.name for field in dataclasses.fields(Deployment) if field.name not in ("topology", "collective", "rank_order")
)


class Work(NamedTuple):
    """A slice with its deployment and what its points ask of it.

    ``load`` is that of their passes. Slices that are ``alike`` have equal durations of computes and equal memory.
    ``audited`` says which points are audited.
    """

    slice: Slice
    alike: Hashable
    dep: Deployment
    point: Point
    passes: Passes
    load: Load
    audited: NDArray[np.bool_]


class Priced(NamedTuple):
    """What the computes and messages of a slice cost: rows for the kernel, what is fixed, how far it is measured."""

    work: Work
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
        self._classes: dict[int, Hashable] = {}
        self._computes: Memo[Computes] = Memo(ROWS_REMEMBERED)
        self._held: Memo[tuple[Columns, Useful]] = Memo(ROWS_REMEMBERED)

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
        return results.assemble(pieces, self.expansion.keys_of(rows), self._identity(rows))

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
                finished.append(beside.submit(self._finish, *prepared, simulated))
            return [piece for future in finished for piece in future.result()]
        finally:
            beside.shutdown(cancel_futures=True)  # an interrupt waits for what is under way, not for what is to come

    def _is_one_simulation(self, batch: Batch) -> bool:
        return self._deployment(batch.slices[0]).collective != BEST and not self._is_apart(batch)

    def _is_apart(self, batch: Batch) -> bool:
        return any(are_apart(self._deployment(s), points(self.expansion, s.rows)) for s in batch.slices)

    def _identity(self, rows: NDArray[np.int64]) -> Columns:
        used, which = np.unique(self.expansion.deployment[rows], return_inverse=True)
        digests = np.array([self._digest(index) for index in used.tolist()], np.uint64)[which]
        return {"point_id": results.point_ids(digests, points(self.expansion, rows)), "row": self.expansion.row[rows]}

    def _digest(self, deployment: int) -> int:
        dep = self.expansion.deployments[deployment]
        return dep.digest if isinstance(dep, Deployment) else _reason_digest(self.expansion, deployment)

    def _invalid(self, s: Slice) -> Columns:
        reasons = np.array(self.expansion.reasons, dtype=object)[self.expansion.reason_code[s.rows]]
        return {"status": ["invalid"] * len(s.rows), "reason": list(reasons)}

    def _deployment(self, s: Slice) -> Deployment:
        dep = self.expansion.deployments[s.deployment]
        assert isinstance(dep, Deployment)
        return dep

    def _work(self, s: Slice, collective: str | None = None, *, audits: bool = True) -> Work:
        dep, point = self._simulated_deployment(s, collective), points(self.expansion, s.rows)
        passes = split_passes(dep, point)
        alike = self._class_of(s.deployment), *(values.tobytes() for values in point)
        return Work(s, alike, dep, point, passes, build_load(dep, *passes.load), self.plan.audited[s.rows] & audits)

    def _class_of(self, deployment: int) -> Hashable:
        """Name what all deployments have in common that differ in their machine's network only."""
        if deployment not in self._classes:
            dep = self.expansion.deployments[deployment]
            fields = (getattr(dep, name) for name in ALIKE_FIELDS)
            # Files by identity: an expansion has one object for each, and keeps it.
            self._classes[deployment] = tuple(id(v) if isinstance(v, Record) else v for v in fields)
        return self._classes[deployment]

    def _common(self, work: Work, step_s: NDArray[np.float64]) -> Columns:
        held, useful = self._apart_from_time(work)
        return {**held, **results.step_columns(work.dep, useful, step_s)}

    def _apart_from_time(self, work: Work) -> tuple[Columns, Useful]:
        """Return columns that no time tells, and what every point is for."""
        known = self._held.get(work.alike)
        if known is None:
            dep, point = work.dep, work.point
            known = results.memory_columns(dep, point, work.passes), results.useful_work(dep, point)
            self._held.keep(work.alike, known, len(work.slice.rows))
        return known

    def _measured(self, work: Work, covered: Coverage | None, keys: CostKeys | None = None) -> Columns:
        network = self.plan.networks[work.slice.deployment]
        unmeasured = [] if keys is None else unmeasured_collectives(work.dep, network, keys.bytes)
        return results.calibration_columns(work.dep, work.passes, covered, unmeasured)

    def _run_math(self, s: Slice) -> Columns:
        work = self._work(s)
        dep, passes, n_passes = work.dep, work.passes, work.passes.n_passes
        times = math_times(dep, self.plan.networks[s.deployment], work.load, n_passes)
        columns = results.over_passes(results.math_columns(dep, times, n_passes), passes)
        return {
            **self._common(work, passes.sum(times.step_s)),
            **self._measured(work, _coverage(work, None)),
            **columns,
        }

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
        dep = self._deployment(s)
        return dep if collective is None else dataclasses.replace(dep, collective=collective)

    def _run_batch(self, batch: Batch) -> Pieces:
        """Simulate a batch; with ``collective = "best"`` by several algorithms, and every row takes the fastest."""
        if self._deployment(batch.slices[0]).collective != BEST:
            return self._run_simulated(batch, None, on_progress=self.on_progress)[0]
        pieces = run_best(batch, self._run_simulated, self.plan.audited)
        self.on_progress(batch.n_rows)
        return pieces

    def _run_simulated(
        self,
        batch: Batch,
        collective: str | None,
        *,
        audits: bool = True,
        on_progress: Callable[[int], None] = lambda n: None,
    ) -> tuple[Pieces, Groups]:
        """Return the columns of a batch, and of every row the groups whose collectives have a choice of algorithms."""
        dep = self._deployment(batch.slices[0])
        if self._is_apart(batch):
            apart = [self._run_apart(self._work(s, collective, audits=audits), on_progress) for s in batch.slices]
            groups = [[open_groups(dep, row.bytes) for row in keys] for _, _, keys in apart]
            return [(n, columns) for n, columns, _ in apart], groups
        prepared = self._prepare(batch, collective, audits=audits)
        pieces = self._finish(*prepared, self._simulate(batch, *prepared, on_progress))
        of_each = open_groups(dep, prepared[0].structure.keys.bytes)
        return pieces, [[of_each] * n for n, _ in pieces]

    def _prepare(self, batch: Batch, collective: str | None = None, *, audits: bool = True) -> Prepared:
        template = self.template(batch, collective)
        template.chain(template.folds()[0])
        works = [self._work(s, collective, audits=audits) for s in batch.slices]
        return template, self._price(template.structure.keys, works)

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

    def _finish(self, template: Template, priced: list[Priced], simulated: Simulated) -> Pieces:
        pieces = []
        begin = 0
        for rows in priced:
            end = begin + rows.work.passes.n_passes
            of_slice = slice(begin, end)
            part = Simulated(simulated.measures[of_slice], simulated.n_events[of_slice], simulated.n_ops[of_slice])
            pieces.append((len(rows.work.slice.rows), self._simulated(template, rows, part)))
            begin = end
        return pieces

    def _run_apart(self, work: Work, on_progress: Callable[[int], None]) -> tuple[int, Columns, list[CostKeys]]:
        """Simulate rows with passes that differ in structure."""
        network, reduced = self.plan.networks[work.slice.deployment], self.fidelity == "exact"
        columns, step_s, keys = run_apart(work.dep, network, work.passes, work.audited, reduced=reduced, jobs=self.jobs)
        n_rows = len(work.slice.rows)
        on_progress(n_rows)
        return n_rows, {**self._common(work, step_s), **self._measured_by_row(work, keys), **columns}, keys

    def _measured_by_row(self, work: Work, keys: list[CostKeys]) -> Columns:
        """Return what of each row is measured, by the ops and messages of its own passes."""
        columns: dict[str, list[object]] = {}
        for own in {id(row): row for row in keys}.values():
            places = [i for i, row in enumerate(keys) if row is own]
            some = self._work(Slice(work.slice.deployment, work.slice.rows[places]))
            for name, values in self._measured(some, _coverage(some, own), own).items():
                whole = columns.setdefault(name, [None] * len(keys))
                for place, value in zip(places, np.asarray(values, object).tolist(), strict=True):
                    whole[place] = value
        return dict(columns)

    def _simulated(self, template: Template, priced: Priced, simulated: Simulated) -> Columns:
        """Return the columns of a slice from the costs and the measures of its passes."""
        work, costs = priced.work, priced.costs
        dep, passes, network = work.dep, work.passes, self.plan.networks[work.slice.deployment]
        of_passes = {
            **results.simulated_columns(dep, network, template, simulated.measures, costs.duration_s, priced.fixed_s),
            "n_ops": np.full(passes.n_passes, template.n_ops),
            "n_ops_simulated": simulated.n_ops,
            "n_events": simulated.n_events,
        }
        pass_s = simulated.measures[:, MAKESPAN_S]
        step_s = passes.sum(pass_s)
        sent = passes.sum(costs.bytes)
        return {
            **self._common(work, step_s),
            **self._measured(work, priced.covered, template.structure.keys),
            **results.over_passes(of_passes, passes),
            **results.traffic_columns(dep, template, sent, costs.capacity[passes.first], step_s),
            **self._audit(template, work, costs, pass_s),
        }

    def _price(self, keys: CostKeys, works: list[Work]) -> list[Priced]:
        """Price the slices of a batch, each class of points once."""
        ops = tuple(dict.fromkeys(split_rate(key)[0] for key in keys.durations))
        known = [self._computes.get((work.alike, ops)) for work in works]
        unknown = {work.alike: work for work, found in zip(works, known, strict=True) if found is None}
        loads = [(work.dep, work.load, work.passes.n_passes) for work in unknown.values()]
        priced = dict(zip(unknown, price_computes(keys, loads), strict=True))
        for alike, computes in priced.items():
            self._computes.keep((alike, ops), computes, unknown[alike].passes.n_passes)
        return [self._priced(keys, work, found or priced[work.alike]) for work, found in zip(works, known, strict=True)]

    def _priced(self, keys: CostKeys, work: Work, computes: Computes) -> Priced:
        dep, load, n_passes = work.dep, work.load, work.passes.n_passes
        network = self.plan.networks[work.slice.deployment]
        return Priced(
            work,
            cost_rows(dep, keys, network, load, n_passes, computes),
            fixed_rows(dep, keys, load, n_passes, computes),
            computes.covered,
        )

    def _audit(self, template: Template, work: Work, costs: CostRows, pass_s: NDArray[np.float64]) -> Columns:
        """Audit every pass of the chosen rows of a slice."""
        s, passes = work.slice, work.passes
        columns: dict[str, list[int | None]] = {name: [None] * len(s.rows) for name in KPIS}
        for row in np.flatnonzero(work.audited):
            total = dict.fromkeys(KPIS, 0)
            for i in passes.of_row(row):
                kpis = audit_pass(work.dep, template, costs, i, passes, i, pass_s[i])
                total = {name: total[name] + getattr(kpis, name) for name in KPIS}
            for name in KPIS:
                columns[name][row] = min(total[name], 2**63 - 1)
        return dict(columns)


def _reason_digest(expansion: Expansion, deployment: int) -> int:
    """Identity of a combination that cannot be deployed: what was written, files by their contents."""
    written = (expansion.deployment_keys.row(deployment), expansion.fingerprints[deployment])
    return int.from_bytes(hashlib.sha256(repr(written).encode()).digest()[:8], "big")


def _coverage(work: Work, keys: CostKeys | None) -> Coverage | None:
    """Return how far a slice is measured, as ops of a structure with ``keys`` or, with None, in closed form."""
    if work.dep.chip.calibration is None:
        return None
    return coverage(work.dep, work.load, work.passes.n_passes, keys)
