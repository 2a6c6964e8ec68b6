"""``g5cp-vec run``: simulate one point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from g5cp_vec.cli._words import UserPath, doing, say

if TYPE_CHECKING:
    from g5cp_vec.runner.breakdown import Breakdown
    from g5cp_vec.runner.layers import Layers
    from g5cp_vec.runner.tally import Category, Wait

# Kinds of waits that are printed, largest first.
_WAITS = 12


@click.command("run", epilog="\b\nExample:\n  g5cp-vec run point.toml --json")
@click.argument("point", type=UserPath())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with every result column.")
@click.option(
    "--fidelity",
    type=click.Choice(["exact", "full"]),
    default="exact",
    show_default=True,
    help="full simulates every rank and every layer; the results are the same.",
)
@click.option(
    "--breakdown", is_flag=True, help="Show what the time of the reported rank goes into, and what it waits for."
)
@click.option("--layers", is_flag=True, help="With --breakdown: the same layer by layer, and what the rank sends.")
def command(point: Path, as_json: bool, fidelity: str, breakdown: bool, layers: bool) -> None:
    """Simulate and audit one point.

    POINT.toml is a grid file with [fixed] only. An audit looks at every rank and layer, and is left out where these
    have more than ten million operations. A point that does not fit into memory (status oom) has its times all
    the same.
    """
    from g5cp_vec.cli._output import announce_compilation, announce_notes
    from g5cp_vec.config.grid import load_point
    from g5cp_vec.runner.api import run_point
    from g5cp_vec.runner.room import POINT_OPS

    if layers and not breakdown:
        raise click.UsageError("--layers is a part of --breakdown: give both")
    checked = load_point(point)
    announce_notes(checked)
    announce_compilation()
    doing("simulating and auditing")
    result = run_point(checked, fidelity=fidelity)
    row, parts = result.to_dict(), result.breakdown() if breakdown else None
    if row["path"] == "g5" and row["lost_ops"] is None:
        n_ops = f"{row['n_ops']:,} operations of all ranks and layers"
        say(f"note: not audited: {n_ops}, the limit is about {POINT_OPS:,}; sweep --audit all audits every point")
    if as_json:
        if parts is not None:
            row["breakdown"] = parts.to_dict()
            if not layers:
                del row["breakdown"]["layers"]
        click.echo(json.dumps(row, allow_nan=False))
        return
    _print_groups(row)
    if parts is not None:
        _print_breakdown(parts)
    if parts is not None and layers:
        _print_layers(parts)


def _print_groups(row: dict[str, Any]) -> None:
    from g5cp_vec.cli._output import print_table

    groups: dict[str, list[tuple[str, str, str]]] = {}
    for name, value in row.items():
        if value is not None:
            exact, readable = _exact(value), _readable(name, value)
            groups.setdefault(_group(name), []).append((name, exact, "" if readable == exact else readable))
    for group, rows in groups.items():
        print_table([group, "value", ""], rows)
    if row["uncalibrated_parts"] is not None:
        click.echo(f"wholly or in part not measured on this chip, at default efficiencies: {row['uncalibrated_parts']}")
    if row["calibrated"] is False:
        click.echo("calibrated = false: compare deployments by these times, do not trust them as absolute")


def _print_breakdown(parts: Breakdown) -> None:
    from g5cp_vec.cli._output import print_table, seconds_text

    def share(seconds: float) -> tuple[str, str]:
        return seconds_text(seconds), f"{seconds / parts.step_s:.1%}"

    computes = [
        (c.name, str(c.n_ops), *share(c.seconds), *map(_seconds_or_blank, _units(c)))
        for c in parts.computes
        if c.seconds
    ]
    print_table(["computes", "ops", "time", "of step", "gemm", "attention", "element-wise", "fixed"], computes)
    shown = [(w.name, w.before, str(w.n_waits), *share(w.seconds), seconds_text(w.longest_s)) for w in parts.waits]
    print_table(["exposed, waiting for", "before", "times", "time", "of step", "longest"], shown[:_WAITS], n_left=2)
    if len(shown) > _WAITS:
        rest = sum(wait.seconds for wait in parts.waits[_WAITS:])
        click.echo(f"and {len(shown) - _WAITS} more, {seconds_text(rest)} together")


def _print_layers(parts: Breakdown) -> None:
    from g5cp_vec.cli._output import bytes_text, print_table, seconds_text

    for run in parts.layers:
        rows = [("compute", c.name, seconds_text(c.seconds), _of_step(c, parts), "", "") for c in run.computes]
        for w in run.waits:
            rows.append(("exposed", f"{w.name} before {w.before}", seconds_text(w.seconds), _of_step(w, parts), "", ""))
        for s in run.sent:
            rows.append(("sent", f"{s.name} {s.message}", "", "", bytes_text(s.sent_bytes), str(s.sent_bytes)))
        print_table([_title(run), "", "time", "of step", "", "bytes"], rows, n_left=2)
        times = [seconds_text(s) for s in (run.seconds, run.shortest_s, run.longest_s, run.exposed_s, run.span_s)]
        between = "" if times[1] == times[2] else f" ({times[1]} to {times[2]})"
        click.echo(f"{times[0]}{between}, exposed {times[3]}; from first start to last end {times[4]}")


def _title(run: Layers) -> str:
    if run.name != "layer":
        return run.name
    if run.n_layers == 1:
        return f"layer {run.first}"
    return f"layers {run.first}-{run.last}: {run.n_layers} x"


def _of_step(part: Category | Wait, parts: Breakdown) -> str:
    return f"{part.seconds / parts.step_s:.2%}"


def _units(category: Category) -> tuple[float, ...]:
    return category.gemm_s, category.attention_s, category.elementwise_s, category.fixed_s


def _seconds_or_blank(seconds: float) -> str:
    from g5cp_vec.cli._output import seconds_text

    return seconds_text(seconds) if seconds else ""


def _group(name: str) -> str:
    """Return the heading a column stands under."""
    from g5cp_vec.runner.schema import HEAD, KEY_TYPES, KPIS, TAIL

    memory = ("kv", "weight", "activation", "buffer", "peak", "hbm", "fits", "max")
    if name in HEAD or name in KEY_TYPES or name in TAIL:
        return "point"
    if name in KPIS:
        return "audit"
    if name.split("_")[0] in memory:
        return "memory"
    if name.endswith("_bytes") or name.startswith("bottleneck"):
        return "traffic"
    return "times" if name.endswith(("_s", "_per_chip", "_ratio")) or name == "mfu" else "simulation"


def _exact(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _readable(name: str, value: Any) -> str:
    from g5cp_vec.cli._output import bytes_text, seconds_text, tokens_text

    if name.endswith("_bytes"):
        return bytes_text(value)
    if name.endswith("seq_len"):
        return tokens_text(value)
    return seconds_text(value) if name.endswith("_s") else ""
