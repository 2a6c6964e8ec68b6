"""The two jobs: a grid becomes a table of results, a point becomes one result."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl

from g5cp_vec.config.collectives import BEST, COLLECTIVES
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.expansion import Expansion
from g5cp_vec.config.grid import Grid, load_grid, load_point
from g5cp_vec.errors import ConfigError, InfeasibleError
from g5cp_vec.runner.breakdown import Breakdown, break_down
from g5cp_vec.runner.local import LocalRunner
from g5cp_vec.runner.plan import Plan, build_plan, points
from g5cp_vec.runner.room import POINT_OPS, refuse_breakdown, refuse_without_room, unfolded_ops
from g5cp_vec.runner.schema import SCHEMA
from g5cp_vec.runner.store import MISSING, Store
from g5cp_vec.runner.warm import warm

GridLike = str | Path | Mapping[str, Any]


class Result:
    """One simulated point; every result column is an attribute (see the column list of the README).

    Parameters
    ----------
    row : dict
        Column name to value, None where a column does not apply.
    explain : callable, optional
        Simulates the point once more and returns its breakdown.
    """

    def __init__(self, row: dict[str, Any], explain: Callable[[], Breakdown] | None = None) -> None:
        self._row = row
        self._explain = explain

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_row"][name]
        except KeyError:
            raise AttributeError(f"no result column {name!r}") from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._row]

    def __repr__(self) -> str:
        shown = {k: v for k, v in self._row.items() if v is not None}
        return f"Result({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def breakdown(self) -> Breakdown:
        """Return where the time of the reported rank goes; see :mod:`g5cp_vec.runner.breakdown`."""
        assert self._explain is not None
        return self._explain()

    def to_dict(self) -> dict[str, Any]:
        """Return every column by name."""
        return dict(self._row)


def expand_and_plan(grid: Grid, fidelity: str = "exact", audit: str = "sample") -> tuple[Expansion, Plan]:
    """Expand a grid and plan its parts; with ``on_invalid = "error"`` an impossible point is refused."""
    expansion = grid.expand()
    if len(expansion) == 0:
        raise ConfigError(f"{grid.name}: points.where: no point passes {grid.where!r}; loosen the filter")
    if grid.on_invalid == "error":
        expansion.refuse_invalid()
    return expansion, build_plan(expansion, fidelity, audit)


def count_jobs(jobs: int | None) -> int:
    """Return the number of threads to use: ``jobs``, or the cores this process may use when None."""
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs is not None and not 1 <= jobs <= 1024:
        raise ConfigError(f"--jobs: expected 1 to 1024 threads, got {jobs}")
    return jobs or most


def run_sweep(
    grid: GridLike | Grid,
    out: str | Path | None = None,
    *,
    jobs: int | None = None,
    audit: str = "sample",
    fidelity: str = "exact",
    resume: bool = True,
    on_plan: Callable[[Expansion, Plan], None] = lambda expansion, plan: None,
    on_progress: Callable[[int], None] = lambda n: None,
    on_resumed: Callable[[int], None] = lambda n: None,
    on_damaged: Callable[[Path, str], None] = lambda path, problem: None,
    collect: bool = True,
) -> pl.DataFrame:
    """Simulate every point of a grid.

    Parameters
    ----------
    grid : path, mapping or Grid
        A grid file, or the same parsed, or checked.
    out : path, optional
        Folder for the Parquet parts and the manifest; without it nothing is written.
    jobs : int, optional
        Threads; all cores by default. Results do not depend on it.
    audit : {"sample", "all", "none"}
        Which rows get the conservation KPIs; ``sample`` takes the first row of every structure and 16 more,
        evenly spaced over the sweep.
    fidelity : {"exact", "full"}
        ``full`` simulates every rank and every layer; ``exact`` uses symmetry and repetition, without approximation.
    resume : bool
        Skip parts that are finished in ``out``; otherwise start afresh.
    on_plan, on_progress : callable
        Called once with expansion and plan, and with the number of rows finished since the last call.
    on_resumed : callable
        Called with the number of rows of each part that was found finished.
    on_damaged : callable
        Called with the file of a part that is there but has to be computed again, and with what is wrong with it.
    collect : bool
        Whether to return the rows; an empty frame otherwise.

    Returns
    -------
    polars.DataFrame
        One row per point, in the order of the grid.

    Raises
    ------
    ConfigError, InfeasibleError
        The grid is wrong; with ``on_invalid = "error"``, a point cannot be.
    """
    checked = grid if isinstance(grid, Grid) else load_grid(grid)
    n_jobs = count_jobs(jobs)
    if audit not in ("sample", "all", "none"):
        raise ConfigError(f"audit: expected sample, all or none, got {audit!r}")
    if fidelity not in ("exact", "full"):
        raise ConfigError(f"fidelity: expected exact or full, got {fidelity!r}")
    expansion, plan = expand_and_plan(checked, fidelity, audit)
    refuse_without_room(checked.label, expansion, plan, fidelity)
    warm()
    on_plan(expansion, plan)
    n_rows_of_part = [sum(batch.n_rows for batch in part) for part in plan.parts]
    contents = {"grid": checked.canonical(), "audit": audit, "fidelity": fidelity}
    runner = LocalRunner(expansion, plan, fidelity, n_jobs, on_progress)
    frames = []
    with nullcontext() if out is None else Store(Path(out), contents, n_rows_of_part, resume=resume) as store:
        for number, part in enumerate(plan.parts):
            problem = MISSING if store is None else store.problem(number)
            if store is not None and problem is None:
                on_resumed(n_rows_of_part[number])
                if collect:
                    frames.append(pl.read_parquet(store.path(number), glob=False))
                continue
            if store is not None and problem is not None and problem != MISSING:
                on_damaged(store.path(number), problem)
            frame = runner.run_part(part)
            if store is not None:
                store.write(number, frame)
            if collect:
                frames.append(frame)
    return pl.concat(frames).sort("row") if frames else pl.DataFrame(schema=SCHEMA)


def run_point(point: GridLike | Grid, *, fidelity: str = "exact") -> Result:
    """Simulate one point, audited unless all its ranks and layers have more than ten million operations.

    Parameters
    ----------
    point : path, mapping or Grid
        Like a grid with ``[fixed]`` only; or such a grid, checked.
    fidelity : {"exact", "full"}
        See `run_sweep`.

    Raises
    ------
    ConfigError, InfeasibleError
        The file is wrong, or the point cannot be deployed.
    """
    checked = point if isinstance(point, Grid) else load_point(point)
    expansion = checked.expand()
    if expansion.reasons:
        raise InfeasibleError(f"{checked.label}: {expansion.reasons[0]}")
    is_small = unfolded_ops(expansion.deployments[0]) <= POINT_OPS
    plan = build_plan(expansion, fidelity, "all" if is_small else "none")
    refuse_without_room(checked.label, expansion, plan, fidelity)
    warm()
    runner = LocalRunner(expansion, plan, fidelity)
    row = runner.run_part(plan.parts[0]).row(0, named=True)
    dep = expansion.deployments[0]
    assert isinstance(dep, Deployment)
    if dep.collective == BEST:
        dep = dataclasses.replace(dep, collective=row["chosen_collective"] or COLLECTIVES[0])

    def explain() -> Breakdown:
        refuse_breakdown(checked.label, dep)
        return break_down(dep, points(expansion, slice(None)), fidelity)

    return Result(row, explain)
