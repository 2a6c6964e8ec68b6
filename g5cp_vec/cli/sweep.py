"""``g5cp-vec sweep``: simulate a grid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from g5cp_vec.cli._words import UserPath, doing

if TYPE_CHECKING:
    from g5cp_vec.cli._progress import Progress
    from g5cp_vec.config.expansion import Expansion
    from g5cp_vec.config.grid import Grid
    from g5cp_vec.runner.plan import Plan


# Rows of a table of winners that a person reads.
_WINNERS_SHOWN = 50


@click.command("sweep", epilog="\b\nExample:\n  g5cp-vec sweep sweeps/quickstart.toml -o results/quickstart")
@click.argument("grid", type=UserPath())
@click.option(
    "-o",
    "--out",
    metavar="DIR",
    type=UserPath(),
    help="Folder of the dataset.  [default: results/NAME]",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Keep the parts that are finished, or start afresh.",
)
@click.option("--jobs", type=int, metavar="N", help="Threads; results do not depend on it.  [default: all cores]")
@click.option(
    "--engine",
    type=click.Choice(["local"]),
    default="local",
    show_default=True,
    help="Where it runs: local is this machine.",
)
@click.option(
    "--fidelity",
    type=click.Choice(["exact", "full"]),
    default="exact",
    show_default=True,
    help="full simulates every rank and every layer; the results are the same.",
)
@click.option(
    "--audit",
    type=click.Choice(["sample", "all", "none"]),
    default="sample",
    show_default=True,
    help="Rows that get conservation KPIs; sample: the first of every structure and 16 more.",
)
@click.option("--quiet", is_flag=True, help="Print errors only.")
def command(
    grid: Path,
    out: Path | None,
    resume: bool,
    jobs: int | None,
    engine: str,
    fidelity: str,
    audit: str,
    quiet: bool,
) -> None:
    """Simulate every point of GRID.toml; write Parquet.

    Parts appear in DIR as they are finished. The same call after an interruption goes on where it stopped.
    """
    from g5cp_vec.cli._output import announce_compilation, announce_notes
    from g5cp_vec.cli._progress import make_progress
    from g5cp_vec.config.grid import load_grid
    from g5cp_vec.runner.api import run_sweep

    doing("reading the grid", quiet=quiet)
    checked = load_grid(grid)
    folder = out or Path("results", _file_name(checked.name))
    if not quiet:
        announce_notes(checked)
        announce_compilation()
    try:
        with make_progress(quiet=quiet) as progress:
            run_sweep(
                checked,
                folder,
                jobs=jobs,
                audit=audit,
                fidelity=fidelity,
                resume=resume,
                on_plan=lambda expansion, plan: progress.begin(len(expansion), _headline(checked, expansion, plan)),
                on_progress=progress.advance,
                on_resumed=progress.resumed,
                on_damaged=progress.damaged,
                collect=False,
            )
    except KeyboardInterrupt:
        again = "the same call" if resume else "the same call without --no-resume"
        raise KeyboardInterrupt(_interruption(folder, again, is_planned=progress.n_rows > 0)) from None
    if not quiet:
        doing("summing up")
        _print_summary(folder, checked, progress)


def _interruption(folder: Path, again: str, *, is_planned: bool) -> str:
    """Return what an interrupted sweep leaves."""
    from g5cp_vec.runner.store import count_finished

    if not is_planned:
        return f"interrupted before the first row; nothing in {folder} was touched"
    n_finished, n_parts = count_finished(folder)
    if not n_finished:
        return "interrupted before the first part was finished; the same call starts from the beginning"
    return f"interrupted: {n_finished} of {n_parts} parts are finished, in {folder}; {again} goes on from there"


def _file_name(name: str) -> str:
    """Return a grid's name as a folder's: no separators, no leading dots."""
    return re.sub(r"[^\w.-]+", "-", name).lstrip(".-") or "sweep"


def _headline(grid: Grid, expansion: Expansion, plan: Plan) -> str:
    n_invalid = int((expansion.reason_code >= 0).sum())
    parts = f"{len(plan.parts)} part{'s' if len(plan.parts) > 1 else ''}"
    same = f", {expansion.n_repeated} the same as another (equal point_id)" if expansion.n_repeated else ""
    return f"{grid.name}: {len(expansion)} points{same}, {plan.n_structures} structures, {n_invalid} invalid, {parts}"


def _print_summary(folder: Path, grid: Grid, progress: Progress) -> None:
    from g5cp_vec.analysis.summary import summarise_sweep
    from g5cp_vec.cli._output import print_table, seconds_text, tokens_text

    computed = "nothing left to compute"
    if progress.n_done:
        elapsed = seconds_text(progress.elapsed_s)
        computed = f"{progress.n_done} points in {elapsed} ({progress.rows_per_s:.1f} points/s)"
    summary = summarise_sweep(folder, grid.axes)
    print_table(["status", "points"], [(status, str(n)) for status, n in summary.n_by_status.items()])
    for reason, n in summary.reasons:
        click.echo(f" invalid, {n} points: {reason}")
    if summary.n_reasons > len(summary.reasons):
        click.echo(f" and {summary.n_reasons - len(summary.reasons)} more reasons: see g5cp-vec check")
    for time, frame in summary.best.items():
        readable = {"seq_len": tokens_text, time: seconds_text}
        print_table(
            [f"best {name.removesuffix('_s').upper()}" if name == time else name for name in frame.columns],
            [
                [readable.get(name, _cell)(value) for name, value in row.items()]
                for row in frame.head(_WINNERS_SHOWN).iter_rows(named=True)
            ],
        )
        if frame.height > _WINNERS_SHOWN:
            click.echo(f" and {frame.height - _WINNERS_SHOWN} more rows, see the dataset: sort by {time} where ok")
    if summary.uncalibrated_parts:
        parts = ", ".join(summary.uncalibrated_parts)
        click.echo(f"wholly or in part not measured on this chip, at default efficiencies: {parts}")
    if summary.n_uncalibrated:
        click.echo("calibrated = false: compare deployments by these times, do not trust them as absolute")
    resumed = f", {progress.n_resumed} found finished" if progress.n_resumed else ""
    click.echo(f"{computed}{resumed}; dataset: {folder}/part-*.parquet")


def _cell(value: object) -> str:
    return "-" if value is None else str(value)
