"""``g5cp-vec accuracy``: predicted against published measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from g5cp_vec.cli._words import UserPath, doing

if TYPE_CHECKING:
    from g5cp_vec.analysis.accuracy import Measurement


@click.command("accuracy", epilog="\b\nExample:\n  g5cp-vec accuracy --plot accuracy.svg")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: measurements and summary.")
@click.option("--plot", metavar="FILE", type=UserPath(), help="Also draw them; .svg or .png.")
def command(as_json: bool, plot: Path | None) -> None:
    """Compare predictions with published measurements.

    All that ship with the package are recomputed. Rows that parameters were fitted to are told from predictions, and
    what a source leaves open is shown under each reading.
    """
    from g5cp_vec.analysis.accuracy import check_plottable, measure_accuracy, plot_accuracy, summarise
    from g5cp_vec.cli._output import announce_compilation, print_table

    if plot is not None:
        check_plottable(plot)
    announce_compilation()
    doing("recomputing published measurements")
    measurements = measure_accuracy()
    summary = summarise(measurements)
    if plot is not None:
        plot_accuracy(measurements, plot)
    if as_json:
        printed = {
            "measurements": [m.to_dict() for m in measurements],
            "summary": [s.to_dict() for s in summary],
        }
        click.echo(json.dumps(printed, allow_nan=False))
        return
    rows = [
        (m.where, _describe(m), m.role, f"{m.measured:.4g}", f"{m.predicted:.4g}", f"{m.error:+.1%}")
        for m in measurements
    ]
    print_table(["where", "what", "role", "measured", "predicted", "error"], rows, n_left=3)
    print_table(
        ["source", "quantity", "role", "rows", "mean error", "median", "max"],
        [
            (s.source, s.quantity, s.role, str(s.n), *(f"{e:.1%}" for e in (s.mean, s.median, s.largest)))
            for s in summary
        ],
        n_left=3,
    )


def _describe(m: Measurement) -> str:
    """Return what was measured, in one line."""
    from g5cp_vec.cli._output import tokens_text

    point = m.point
    degrees = " ".join(f"{key}{point[key]}" for key in ("tp", "cp", "ep") if point.get(key, 1) != 1)
    tokens = tokens_text(point["seq_len"]) if "=" not in m.reading else m.reading
    cached = f", {point['cached_tokens']} cached" if point.get("cached_tokens") else ""
    batch = f", batch {point['batch']}" if point.get("batch", 1) != 1 else ""
    per = f" / {m.per}" if m.per != 1 else ""
    users = ", {concurrency} users, {output_tokens} out".format(**m.asked) if m.asked else ""
    layout = f"{degrees}, " if degrees else ""
    return f"{m.quantity}{per}: {point['model']} on {point['chip']}, {layout}{tokens}{cached}{batch}{users}"
