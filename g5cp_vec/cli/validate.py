"""``g5cp-vec validate``: checks over a finished sweep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from g5cp_vec.cli._words import UserPath, doing

if TYPE_CHECKING:
    import polars as pl

    from g5cp_vec.analysis.validate import Validation

FOUND_SOMETHING = 1
_SHOWN = 20


@click.command("validate", epilog="\b\nExample:\n  g5cp-vec validate results/validation-cp-s")
@click.argument("folder", metavar="DIR", type=UserPath())
@click.pass_context
def command(ctx: click.Context, folder: Path) -> None:
    """Check the rows of a finished sweep.

    The exit status is 1 on a violation. All conservation KPIs must be 0, and TTFT must not rise with cp where the
    ring hides its communication; at least 80 % of the pairs must be such.
    """
    from g5cp_vec.analysis.validate import validate_sweep
    from g5cp_vec.cli._output import print_table

    doing("reading and checking rows")
    verdict = validate_sweep(folder)
    print_table(["check", "examined", "result"], list(_checks(verdict)), n_left=3)
    for line in _violations(verdict):
        click.echo(line)
    if not verdict.is_sound:
        ctx.exit(FOUND_SOMETHING)


def _checks(verdict: Validation) -> Iterator[tuple[str, str, str]]:
    monotone = _result(verdict.rises.height, "rise")
    if verdict.masked_share is None:
        pairs, monotone = "no pair of prefill points differs in cp alone", "not checked"
    else:
        pairs = f"{verdict.n_pairs} pairs, {verdict.n_masked} masked ({verdict.masked_share:.1%})"
    if verdict.is_vacuous:
        monotone = f"vacuous, {monotone}"
    yield "TTFT does not rise with cp", pairs, monotone
    audited = f"{verdict.n_audited} audited of {verdict.n_simulated} rows"
    yield "conservation", audited, _result(verdict.lost.height, "row") if verdict.n_audited else "not checked"
    yield "plausibility", f"{verdict.n_simulated} rows", _result(verdict.broken.height, "violation")


def _result(n: int, noun: str) -> str:
    return "ok" if n == 0 else f"{n} {noun}{'s' if n > 1 else ''}"


def _violations(verdict: Validation) -> Iterator[str]:
    from g5cp_vec.analysis.validate import LEAST_MASKED_SHARE

    if not verdict.is_finished:
        yield f"unfinished: {verdict.n_rows} of {verdict.n_expected} rows are here; the sweep's call finishes it"
    if verdict.is_vacuous:
        yield (
            f"vacuous: {verdict.masked_share:.1%} of the pairs are masked, {LEAST_MASKED_SHARE:.0%} are needed for a "
            "verdict; use longer contexts, faster links or smaller cp"
        )
    for row in _first(verdict.rises):
        keys = ", ".join(f"{key} = {value}" for key, value in row.items() if not key.startswith(("row", "ttft", "cp")))
        yield (
            f"TTFT rises from {row['ttft_s']:.6g} s (row {row['row']}, cp = {row['cp']}) to "
            f"{row['ttft_s_wide']:.6g} s (row {row['row_wide']}, cp = {row['cp_wide']}): {keys}"
        )
    for row in _first(verdict.lost):
        kpis = ", ".join(f"{key} = {row[key]}" for key in verdict.lost.columns[2:] if row[key] != 0)
        yield f"row {row['row']} (point {row['point_id']}) is not conserved: {kpis}"
    for row in _first(verdict.broken):
        yield f"row {row['row']} (point {row['point_id']}) breaks the rule: {row['rule']}"
    hidden = sum(max(frame.height - _SHOWN, 0) for frame in (verdict.rises, verdict.lost, verdict.broken))
    if hidden:
        yield f"and {hidden} more"


def _first(frame: pl.DataFrame) -> Iterator[dict[str, object]]:
    return frame.head(_SHOWN).iter_rows(named=True)
