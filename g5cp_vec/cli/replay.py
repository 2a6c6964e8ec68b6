"""``g5cp-vec replay``: simulate a workload given operation by operation."""

from __future__ import annotations

import json
from pathlib import Path

import click

from g5cp_vec.cli._words import UserPath, doing


@click.command("replay", epilog="\b\nExample:\n  g5cp-vec replay workload.json --json")
@click.argument("workload", type=UserPath())
@click.option("--json", "as_json", is_flag=True, help='Print {"makespan": s, "start": [...], "finish": [...]}.')
def command(workload: Path, as_json: bool) -> None:
    """Simulate the operations of WORKLOAD.json.

    The file lists links, operations and dependencies; printed is when each operation ran.
    """
    from g5cp_vec.cli._output import announce_compilation
    from g5cp_vec.runner.workload import replay_workload

    announce_compilation()
    doing("reading and simulating the workload")
    replay = replay_workload(workload)
    if as_json:
        times = {"makespan": replay.makespan, "start": replay.start.tolist(), "finish": replay.finish.tolist()}
        click.echo(json.dumps(times, allow_nan=False))
        return
    # Plain lines: a workload may have a million operations, and a table would be laid out for minutes.
    lines = [f"makespan: {replay.makespan!r} s", f"{'op':>8} {'start_s':>24} {'end_s':>24}"]
    spans = zip(replay.start.tolist(), replay.finish.tolist(), strict=True)
    lines += [f"{op:8} {start!r:>24} {end!r:>24}" for op, (start, end) in enumerate(spans)]
    click.echo("\n".join(lines))
