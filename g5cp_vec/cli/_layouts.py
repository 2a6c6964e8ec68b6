"""Layouts as a person reads them. Imported by commands when they run."""

from __future__ import annotations

from collections.abc import Sequence

import click

from g5cp_vec.analysis.layouts import layout_key, legal_rows, rank_groups, rank_rows
from g5cp_vec.cli._output import print_table
from g5cp_vec.config.context import SEMANTICS
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.grid import Grid
from g5cp_vec.config.model import Model

# A layout of more chips is shown when asked for.
_MOST_CHIPS = 64
# A table of more lines, cells being broken into so many characters at the least, is too much to be laid out.
_MOST_LINES, _NARROWEST = 1024, 8


def print_layouts(grid: Grid, *, every: bool) -> None:
    """Print ranks and groups: of the one layout with pcp or dcp that a grid has, or of ``every`` one."""
    deployments = [dep for dep in grid.expand().deployments if isinstance(dep, Deployment)]
    distinct = {layout_key(dep): dep for dep in deployments if every or dep.is_sharded}
    if not every and (len(distinct) != 1 or next(iter(distinct.values())).n_chips > _MOST_CHIPS):
        return
    for dep in distinct.values():
        degrees = {"dp": dep.dp, "pp": dep.pp, "cp": dep.cp, "pcp": dep.pcp, "tp": dep.tp, "dcp": dep.dcp}
        shown = ", ".join(f"{name} = {n}" for name, n in degrees.items() if n > 1) or "one rank"
        click.echo(f"{shown} ({dep.cp_semantics})" if dep.cp_semantics else shown)
        split = "pcp" if dep.cp == 1 else "cp"
        _print_rows(["chip", "dp", "pp", split, "tp", "KV shard"], [list(map(str, row)) for row in rank_rows(dep)])
        groups = [
            (name, " | ".join(" ".join(map(str, chips)) for chips in members))
            for name, members in rank_groups(dep).items()
        ]
        if groups:
            _print_rows(["group", "chips"], groups, n_left=2)


def _print_rows(headers: list[str], rows: Sequence[Sequence[str]], *, n_left: int = 1) -> None:
    """Print a table, and plain lines with tabs of what is too much to be laid out."""
    if max(len(rows), *(len(cell) // _NARROWEST for row in rows for cell in row)) <= _MOST_LINES:
        print_table(headers, rows, n_left=n_left)
    else:
        click.echo("\n".join("\t".join(row) for row in (headers, *rows)))


def print_legal(grid: Grid) -> None:
    """Print every legal (tp, pcp, dcp) of the models of a grid on its chips."""
    for text in grid.values("model"):
        for n_chips in grid.values("n_chips"):
            for pp in grid.values("pp"):
                if n_chips % pp == 0:
                    for semantics in grid.values("cp_semantics"):
                        print_legal_of(grid.objects["model", text], n_chips // pp, semantics)


def print_legal_of(model: Model, n_chips: int, semantics: str) -> None:
    """Print the legal (tp, pcp, dcp) of one model, the rest of the chips being dp."""
    assert semantics in SEMANTICS
    click.echo(f"{model.name} on {n_chips} chips, {semantics}: what its heads allow")
    rows = [
        (str(tp), str(pcp), str(dcp), str(shards), str(n_chips // (tp * pcp)))
        for tp, pcp, dcp, shards in legal_rows(model, n_chips, semantics)
    ]
    print_table(["tp", "pcp", "dcp", "KV shards", "dp"], rows, n_left=0)
