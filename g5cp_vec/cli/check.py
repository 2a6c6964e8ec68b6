"""``g5cp-vec check``: what a grid holds and what it will cost, without simulating."""

from __future__ import annotations

from pathlib import Path

import click

from g5cp_vec.cli._words import UserPath, doing

_REASONS_SHOWN = 12


@click.command("check", epilog="\b\nExample:\n  g5cp-vec check sweeps/deepseek_v3_1m.toml")
@click.argument("grid", type=UserPath())
@click.option("--ranks", is_flag=True, help="Show ranks and groups of every layout, not only of a single one.")
@click.option("--legal", is_flag=True, help="Show every legal (tp, pcp, dcp) of the grid's models on its chips.")
def command(grid: Path, ranks: bool, legal: bool) -> None:
    """Count the points of GRID.toml and estimate their cost.

    Nothing is simulated. Combinations that cannot be deployed are counted by reason. Where the grid has one layout with
    pcp or dcp, its ranks and groups are shown.
    """
    from g5cp_vec.analysis.estimate import OPS_PER_S, estimate_sweep
    from g5cp_vec.analysis.reasons import group_reasons
    from g5cp_vec.cli._layouts import print_layouts, print_legal
    from g5cp_vec.cli._output import bytes_text, print_table, seconds_text
    from g5cp_vec.config.grid import load_grid
    from g5cp_vec.errors import InfeasibleError

    doing("counting points")
    checked = load_grid(grid)
    size = estimate_sweep(checked)
    n_invalid = size.n_points - size.n_valid
    print_table(
        [checked.name, ""],
        [
            ("points", str(size.n_points)),
            ("valid", str(size.n_valid)),
            ("invalid", str(n_invalid)),
            *([("the same as another point", str(size.n_repeated))] if size.n_repeated else []),
            ("structures", str(size.n_structures)),
            ("parts of the dataset", str(size.n_parts)),
            ("operations to simulate, about", f"{size.n_ops:,}"),
            ("time, about", seconds_text(size.seconds)),
            ("time of the audits on top, about", seconds_text(size.audit_seconds)),
            ("memory, about", bytes_text(size.memory_bytes)),
        ],
    )
    click.echo(
        f"time and memory are estimates, at {OPS_PER_S / 1e6:g} million operations/s on two cores and --audit sample; "
        "the first call of an installation compiles for 20 to 60 seconds more"
    )
    print_layouts(checked, every=ranks)
    if legal:
        print_legal(checked)
    if notes := checked.notes():
        print_table(["about the models"], [(note,) for note in notes])
    if size.reasons:
        few = len(size.reasons) <= _REASONS_SHOWN
        groups = size.reasons if few else group_reasons(size.reasons)
        print_table(["invalid because", "points"], [(reason, str(n)) for reason, n in groups[:_REASONS_SHOWN]])
        if len(groups) > _REASONS_SHOWN:
            rest = sum(n for _, n in groups[_REASONS_SHOWN:])
            click.echo(f"and {rest} points for {len(groups) - _REASONS_SHOWN} more reasons; a sweep records each")
    if size.reasons and checked.on_invalid == "error":
        raise InfeasibleError(
            f'{grid}: points.on_invalid = "error" and {n_invalid} points are invalid; '
            'leave them out with points.where, or use "record"'
        )
