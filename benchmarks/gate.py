"""The regression gate: python benchmarks/gate.py [--update].

What a simulation has to do (ops, instants, rate solves, link visits) is the same on every machine, so it is compared
for equality. What it costs is not, so it is divided by what a fixed piece of work costs on the same machine in the
same minute, each time measured right before; a ratio may not exceed `LIMIT` times the committed one.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np
from calibration import Calibration
from deployments import LARGE, SHAPE, build_template, costs_of, deploy, lengths, prepare
from simulation import Simulation
from workloads import FAMILIES, Workload, full_fidelity, make

from g5cp_vec.runner.api import run_sweep
from g5cp_vec.runner.simulate import simulate_rows
from g5cp_vec.runner.template import Template

BASELINE = Path(__file__).with_name("baseline.json")
LIMIT = 1.6
ROUNDS = 15
# A case above the limit is measured again: noise passes, a regression stays.
TRIES = 3

Counters = dict[str, dict[str, int]]

DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "symmetric": {**SHAPE, "n_chips": 64},
    "decode": {**SHAPE, "n_chips": 64, "topology": "hgx-8", "phase": "decode"},
    "experts": LARGE,
    "shared spine": {**LARGE, "topology": "hgx-8-oversub2", "cp": 4},
    "direct": {**LARGE, "tp": 8, "cp": 2, "ep": 16, "collective": "direct"},
    "stages": {**SHAPE, "n_chips": 192, "topology": "hgx-8", "pp": 3, "cp": 4},
    "racks": {**SHAPE, "n_chips": 96, "topology": "nvl72", "cp": 12, "seq_len": "512K"},
    "racks, settles late": {**SHAPE, "n_chips": 80, "topology": "nvl72", "cp": 10, "seq_len": "64K"},
}

# Small enough that a sweep of it is mostly templates, costs and columns, as the start of any sweep is.
SWEEP = {
    "name": "gate",
    "fixed": {"model": "llama-3.1-8b", "chip": "h100-sxm", "topology": "hgx-8", "n_chips": 16, "dp": "auto"},
    "axes": {"phase": ["prefill", "decode"], "tp": [2, 4], "cp": [1, 4], "seq_len": lengths(250)},
}


def count() -> Counters:
    """Run every case once; return what each had to do."""
    counters = {}
    for family in FAMILIES:
        simulation = Simulation(make(family, "small"))
        simulation.run()
        counters[family] = simulation.counters
    for name, keys in DEPLOYMENTS.items():
        template, costs = _template(**keys)
        done = simulate_rows(template, costs)
        # Solves and visits of the shortest chain; the others are the same work again.
        simulation = Simulation(Workload(template.chain(template.folds()[0]).graph, costs_of(costs, 0)))
        simulation.run()
        counters[name] = {
            **simulation.counters,
            "n_ops": template.n_ops,
            "n_ops_simulated": int(done.n_ops[0]),
            "n_events": int(done.n_events[0]),
        }
    return counters


def _template(**keys: Any) -> tuple[Template, Any]:
    structure, costs = prepare(**keys)
    return Template(structure, reduced=True), costs


def timed_cases() -> dict[str, Callable[[], Any]]:
    """Return what is timed, ready to be called; each takes some milliseconds."""
    cases: dict[str, Callable[[], Any]] = {}
    for family in ("ring_star", "ring_torus", "random", "all_to_all", "incast"):
        size = "small" if family == "all_to_all" else "medium"
        cases[f"{family} {size}"] = Simulation(make(family, size)).run
    cases["full fidelity"] = Simulation(full_fidelity(*prepare(**{**LARGE, "n_chips": 16, "cp": 4}))).run
    template, costs = _template(**{**LARGE, "seq_len": lengths(100)})
    cases["reduced, 100 points"] = lambda: simulate_rows(template, costs)
    dep, network, _ = deploy(**LARGE)
    cases["template"] = lambda: build_template(dep, network)
    cases["sweep, 2000 points"] = lambda: run_sweep(SWEEP, jobs=1, audit="none")
    return cases


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(cases: Mapping[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the cost of each case in units of the calibration: the median over rounds, both measured in turn."""
    unit = Calibration().run
    for work in cases.values():
        work()
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    gc.collect()
    gc.disable()  # a collection is as long as a case
    try:
        for _ in range(rounds):
            before = _seconds(unit)
            for name, work in cases.items():
                cost = _seconds(work)
                after = _seconds(unit)
                ratios[name].append(2 * cost / (before + after))
                before = after
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in ratios.items()}


def compare_counters(found: Counters, baseline: Counters) -> list[str]:
    """Return a line per counter that is not the baseline's."""
    lines = []
    for case in sorted(found.keys() | baseline.keys()):
        mine, theirs = found.get(case), baseline.get(case)
        if mine is None or theirs is None:
            lines.append(f"{case}: only {'measured' if theirs is None else 'in the baseline'}")
            continue
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                lines.append(f"{case}: {name} is {mine.get(name)}, was {theirs.get(name)}")
    return lines


def compare_costs(found: Mapping[str, float], baseline: Mapping[str, float]) -> dict[str, str]:
    """Return a line for every case that costs more than the baseline allows, or that only one of the two knows."""
    lines = {}
    for case in sorted(found.keys() | baseline.keys()):
        if case not in found or case not in baseline:
            lines[case] = f"{case}: only {'measured' if case in found else 'in the baseline'}"
        elif found[case] > LIMIT * baseline[case]:
            share = found[case] / baseline[case]
            lines[case] = f"{case}: costs {found[case]:.3g} calibrations, {share:.2f} of the baseline (limit {LIMIT})"
    return lines


def check_costs(baseline: Mapping[str, float]) -> tuple[list[str], dict[str, float]]:
    """Measure; measure again what costs too much. Return what still does, and the costs."""
    cases = timed_cases()
    costs = measure(cases)
    lines = compare_costs(costs, baseline)
    for _ in range(TRIES - 1):
        again = [case for case in lines if case in cases and case in baseline]
        if not again:
            break
        for case, cost in measure({case: cases[case] for case in again}).items():
            costs[case] = min(costs[case], cost)
        lines = compare_costs(costs, baseline)
    return list(lines.values()), costs


def update(path: Path) -> None:
    """Write the baseline anew."""
    cases = timed_cases()
    several = [measure(cases) for _ in range(3)]
    costs = {case: round(statistics.median(each[case] for each in several), 3) for case in cases}
    made = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
    }
    path.write_text(json.dumps({"made": made, "counters": count(), "costs": costs}, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when nothing has become worse, 1 otherwise."""
    parser = argparse.ArgumentParser(description="Compare counters and relative costs with the committed baseline.")
    parser.add_argument("--update", action="store_true", help="write the baseline anew")
    parser.add_argument("--counters", action="store_true", help="compare the counters only; nothing is timed")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.update:
        update(options.baseline)
        print(f"gate: {options.baseline} written")
        return 0
    baseline = json.loads(options.baseline.read_text())
    lines = compare_counters(count(), baseline["counters"])
    worst = ""
    if not options.counters:
        more, costs = check_costs(baseline["costs"])
        lines += more
        shares = {case: costs[case] / baseline["costs"][case] for case in costs if case in baseline["costs"]}
        for case, share in shares.items():
            print(f"gate: {case}: {costs[case]:.3g} calibrations, {share:.2f} of the baseline")
        worst = f", costs at most {max(shares.values()):.2f} of it"
    for line in lines:
        print(f"gate: {line}", file=sys.stderr)
    if lines:
        print("gate: if this is meant, run python benchmarks/gate.py --update and commit it", file=sys.stderr)
        return 1
    print(f"gate: counters equal the baseline{worst}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
