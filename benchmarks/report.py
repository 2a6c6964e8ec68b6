"""Writes README.md from a run of the benchmarks: python benchmarks/report.py [--all] [--json FILE].

Every number in that file comes from here; none is edited by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
INTRODUCTION = """\
# Benchmarks

```
pytest benchmarks --benchmark-enable                          # all groups, minutes
pytest benchmarks --benchmark-enable -m 'slow or not slow'    # a million ops, a million points, cold compilation too
python benchmarks/gate.py                                     # CI's regression gate; --update writes baseline.json
python benchmarks/report.py --all                             # runs everything and writes this file
```

| file | asks |
|---|---|
| `test_bench_kernel.py` | one call of the kernel, seven families, a thousand to a million ops, no two events at once |
| `test_bench_simulation.py` | one deployment, full and reduced; a point on 64 to 16,384 chips; building templates |
| `test_bench_sweep.py` | points per second of `reference_grid.toml`; memory of a million points |
| `test_bench_startup.py` | import, `--help`, first answer of a process, first compilation ever |
| `test_bench_peer.py` | the same workloads in SimGrid's C++ (skipped without `libsimgrid-dev` or a compiler) |
| `gate.py` | exact counters, and costs in units of fixed work timed in between, against `baseline.json` |
| `which_split.py` | the table of the README's question, from the dataset of its sweep |
| `frontend.py` | what a server's front end takes per request and per token: `frontend_*_us` of the runtimes |

SimGrid is timed in its loop alone, twice. "Plain use" is what a program in C++ that follows its manual does: an
activity for every op, and the default (lazy) update. "Fastest variant" is the fastest of four on the workload: lazy or
full updates, computes as activities or as mere timers, which leaves its processor model out. Code of ours resolves
dependencies and lets chips choose in both. Its answers agree with ours to 1e-9. Rates of a sweep are marginal,
(N2 - N1) / (t2 - t1) over two sizes of one grid.
"""
MISSING = "not measured in this run"


class Verdict(NamedTuple):
    """One target: what was wanted, what was found, and whether that meets it (None when it was not measured)."""

    work: str
    target: str
    measured: str
    is_met: bool | None


class Results:
    """Benchmarks of a run by name."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self._all = {f"{b['fullname'].split('::')[0].split('/')[-1]}::{b['name']}": b for b in data["benchmarks"]}

    def group(self, name: str) -> list[dict[str, Any]]:
        """Return the benchmarks of a group."""
        return [b for b in self._all.values() if b["group"] == name]

    def extra(self, name: str, key: str) -> Any:
        """Return what a benchmark recorded beside its time, None when it did not run."""
        return self._all.get(name, {}).get("extra_info", {}).get(key)

    def median(self, name: str) -> float | None:
        """Return a benchmark's median time (s), None when it did not run."""
        return self._all[name]["stats"]["median"] if name in self._all else None


def digits(value: float, n: int = 3) -> str:
    """Write a number with ``n`` significant digits and thousands separated."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    decimals = n - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, decimals):,.{max(0, decimals)}f}"


def seconds(value: float) -> str:
    """Write a time in a readable unit."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= limit:
            return f"{digits(value / limit)} {unit}"
    return f"{digits(value * 1e9)} ns"


def at_least(work: str, limit: float, found: float | None, write: Callable[[float], str], aim: str = "") -> Verdict:
    """Judge a number that should be large."""
    return Verdict(work, f">= {write(limit)}{aim}", *_judge(found, write, found is not None and found >= limit))


def below(work: str, limit: float, found: float | None, write: Callable[[float], str]) -> Verdict:
    """Judge a number that should be small."""
    return Verdict(work, f"< {write(limit)}", *_judge(found, write, found is not None and found < limit))


def _judge(found: float | None, write: Callable[[float], str], is_met: bool) -> tuple[str, bool | None]:
    return (MISSING, None) if found is None else (write(found), is_met)


def times(value: float) -> str:
    """Write a ratio."""
    return f"{digits(value)} x"


def rate(value: float) -> str:
    """Write points per second."""
    return f"{digits(value)} points/s"


def million_ops(value: float) -> str:
    """Write ops per second."""
    return f"{digits(value / 1e6)} million ops/s"


def gigabytes(value: float) -> str:
    """Write bytes."""
    return f"{digits(value / 1e9)} GB"


def verdicts(r: Results) -> list[Verdict]:
    """Return every target and what was found."""
    return [*_full_fidelity(r), *_desynchronised(r), *_sweep(r), *_templates(r), *_rest(r)]


def _full_fidelity(r: Results) -> list[Verdict]:
    ours, peer = "test_bench_simulation.py::test_full", "test_bench_peer.py::test_full"
    n_ops = r.extra(ours, "n_ops")
    work = "full fidelity, 64 chips, 61 layers, cp 16" + (f" ({n_ops:,} ops)" if n_ops else "")
    batch = "the same, points on two threads, against SimGrid"
    found = [at_least(f"{work}, one thread", 15e6, r.extra(ours, "ops_per_s"), million_ops)]
    for use in ("plain use", "fastest variant"):
        name = f"times_{use.split()[0]}"
        found.append(at_least(f"the same against SimGrid, {use}", 50, r.extra(peer, name), times))
        found.append(at_least(f"{batch}, {use}", 100, r.extra(peer, f"{name}_batch"), times))
    return found


def _desynchronised(r: Results) -> list[Verdict]:
    found = []
    for b in r.group("peer"):
        if b["params"]:
            e = b["extra_info"]
            work = f"no two events at once: {b['params']['family']}, {e['n_ops']:,} ops, against SimGrid"
            for use in ("plain use", "fastest variant"):
                found.append(at_least(f"{work}, {use}", 3, e[f"times_{use.split()[0]}"], times, ", aim 10"))
    return found


def _sweep(r: Results) -> list[Verdict]:
    found = []
    for jobs in (1, 2):
        names = [f"test_bench_sweep.py::test_marginal_rate[{steps}-{jobs}]" for steps in ("whole", "short")]
        name = names[0] if r.median(names[0]) else names[1]
        work = f"reference grid, {jobs} thread{'s' * (jobs > 1)}"
        if r.median(name):
            fixed = seconds(r.extra(name, "fixed_s"))
            work += f" (to {r.extra(name, 'n_points'):,} points; start and templates beside it: {fixed})"
        found.append(at_least(work, 20_000, r.extra(name, "marginal_points_per_s"), rate, ", aim 50,000"))
    return found


def _templates(r: Results) -> list[Verdict]:
    name = "test_bench_simulation.py::test_cost_over_chips"
    found = [below("cost per point, one shape on 64 and on 16,384 chips", 2, r.extra(name, "growth"), times)]
    for b in r.group("template"):
        limit = 5e-3 if b["params"]["name"].startswith("64 ") else 1.0
        work = f"building and refining a template: {b['params']['name']}"
        found.append(below(work, limit, b["stats"]["median"], seconds))
    return found


def _rest(r: Results) -> list[Verdict]:
    start = "test_bench_startup.py"
    peak = r.extra("test_bench_sweep.py::test_memory", "peak_rss_bytes")
    return [
        below("peak memory of a million points", 2e9, peak, gigabytes),
        below("`import g5cp_vec`", 1, r.median(f"{start}::test_start[import]"), seconds),
        below("`g5cp-vec --help`", 0.5, r.median(f"{start}::test_start[help]"), seconds),
        below("first compilation ever", 30, r.median(f"{start}::test_compilation[first run ever]"), seconds),
    ]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Write a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def kernel_table(r: Results) -> str:
    """Write the kernel's rates, a line per family and size."""
    rows = []
    for b in r.group("kernel"):
        e = b["extra_info"]
        naive = e.get("times_naive")
        rows.append(
            [
                b["params"]["family"], f"{e['n_ops']:,}", seconds(b["stats"]["median"]), seconds(b["stats"]["min"]),
                digits(e["ops_per_s"] / 1e6),
                digits(e["ns_per_event"]), f"{e['n_solves']:,}", f"{e['n_link_visits']:,}",
                "" if naive is None else times(naive),
            ]
        )  # fmt: skip
    rows.sort(key=lambda row: (row[0], int(row[1].replace(",", ""))))
    counts = ["rate solves", "link visits", "naive twin takes"]
    header = ["family", "ops", "median", "least", "million ops/s", "ns/event", *counts]
    return table(header, rows)


def peer_table(r: Results) -> str:
    """Write ours beside SimGrid's rates: in plain use, of the fastest variant, and of each."""
    rows = []
    for b in r.group("peer"):
        e = b["extra_info"]
        name = b["params"]["family"] if b["params"] else "full fidelity"
        row = [name, f"{e['n_ops']:,}", digits(e["ops_per_s"] / 1e6)]
        for use in ("plain", "fastest"):
            ratio = f"{times(e[f'times_{use}'])} ({times(e[f'times_{use}_best'])})"
            row += [digits(e[f"{use}_ops_per_s"] / 1e6), ratio]
        row.append(", ".join(f"{variant} {digits(each / 1e6)}" for variant, each in e["variants_ops_per_s"].items()))
        rows.append(row)
    header = [
        "workload", "ops", "million ops/s", "SimGrid, plain use", "ratio (of best times)",
        "SimGrid, fastest variant", "ratio (of best times)", "variants",
    ]  # fmt: skip
    return table(header, rows) if rows else f"SimGrid: {MISSING}.\n"


def other_table(r: Results) -> str:
    """Write the medians of everything else."""
    rows = []
    for group in ("simulation", "template", "sweep", "startup"):
        for b in r.group(group):
            beside = ", ".join(f"{name} {_written(value)}" for name, value in b["extra_info"].items())
            median, least = (seconds(b["stats"][which]) for which in ("median", "min"))
            rows.append([group, b["name"].removeprefix("test_"), median, least, beside])
    return table(["group", "benchmark", "median", "least", "beside"], rows)


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_written(each)}" for name, each in value.items()) + "}"
    return digits(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def machine(r: Results) -> str:
    """Write where and with what the run was made."""
    info = r.data["machine_info"]
    peers = [b["extra_info"].get("simgrid") for b in r.group("peer")]
    versions = [f"{name} {version(name)}" for name in ("numba", "numpy", "polars", "pyarrow")]
    parts = [
        info.get("cpu", {}).get("brand_raw", platform.processor()),
        f"{info.get('cpu', {}).get('count', os.cpu_count())} cores",
        f"{info['system']} {info['release']}",
        f"Python {info['python_version']}",
        *versions,
        *peers[:1],
    ]
    return f"Made on {r.data['datetime'][:10]}: {', '.join(str(part) for part in parts)}."


def render(data: dict[str, Any]) -> str:
    """Return the whole file."""
    r = Results(data)
    mark = {True: "met", False: "**missed**", None: ""}
    rows = [[v.work, v.target, v.measured, mark[v.is_met]] for v in verdicts(r)]
    return "\n".join(
        [
            INTRODUCTION,
            machine(r) + "\n",
            "## Targets\n",
            table(["work", "target", "measured", ""], rows),
            "## Kernel\n",
            kernel_table(r),
            "## Peer\n",
            peer_table(r),
            "## Everything else\n",
            other_table(r),
        ]
    )


def run(everything: bool, more: list[str]) -> dict[str, Any]:
    """Run the benchmarks; return what they found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run.json")
        command = [sys.executable, "-m", "pytest", str(HERE), "--benchmark-enable", f"--benchmark-json={out}", *more]
        subprocess.run(command + (["-m", "slow or not slow"] if everything else []), check=True, cwd=HERE.parent)
        return json.loads(out.read_text())


def main() -> None:
    """Run, or read a run, and write the file."""
    parser = argparse.ArgumentParser(description="Write benchmarks/README.md.")
    parser.add_argument("--all", action="store_true", help="run what is slow too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="render a run of pytest-benchmark that was kept")
    parser.add_argument("more", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    data = json.loads(options.json.read_text()) if options.json else run(options.all, options.more)
    (HERE / "README.md").write_text(render(data))


if __name__ == "__main__":
    main()
