"""Chunked prefill whose passes differ in structure: every pass runs on its own graph, and they are added up.

How cached context is gathered decides the graph (`g5cp_vec.mapping.sharding`), and how far back windows and chunks of
attention reach (`g5cp_vec.mapping.spans`); a pass has more context than the one before. Passes that share a graph are
simulated together. A rank's traffic and a link's load are summed over the passes rank by rank and link by link, before
the largest is taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.rows import cost_rows, fixed_rows, price_computes
from g5cp_vec.engine.arrays import FLOW
from g5cp_vec.engine.measure import MAKESPAN_S
from g5cp_vec.mapping.graph import REASON, CostKeys
from g5cp_vec.mapping.load import Load, build_load
from g5cp_vec.mapping.network import Network
from g5cp_vec.mapping.spans import structure_reach, varies_with_load
from g5cp_vec.mapping.structure import Structure, build_structure
from g5cp_vec.runner import results
from g5cp_vec.runner.audited import audit_pass
from g5cp_vec.runner.passes import Passes, Point, count_passes
from g5cp_vec.runner.results import Columns
from g5cp_vec.runner.schema import KPIS
from g5cp_vec.runner.simulate import simulate_rows
from g5cp_vec.runner.template import TRAFFIC, Template, most_used


class Alike(NamedTuple):
    """Passes that share a structure: their numbers, their load, the structure."""

    numbers: NDArray[np.int64]
    load: Load
    structure: Structure


def are_apart(dep: Deployment, point: Point) -> bool:
    """Whether some row has several passes, which may differ in structure."""
    n_each = count_passes(point, dep.phase == "prefill", dep.step_tokens or 0)
    return varies_with_load(dep) and bool(np.any(n_each > 1))


def by_structure(dep: Deployment, network: Network, passes: Passes) -> Iterator[Alike]:
    """Yield the passes that share a structure, one structure after another."""
    reach = structure_reach(dep, build_load(dep, *passes.load))
    distinct, which = np.unique(reach, axis=0, return_inverse=True)
    for place, numbers in enumerate(distinct.tolist()):
        members = np.flatnonzero(which.ravel() == place)
        load = build_load(dep, *(values[members] for values in passes.load))
        yield Alike(members, load, build_structure(dep, network, numbers))


def run_apart(
    dep: Deployment, network: Network, passes: Passes, audited: NDArray[np.bool_], *, reduced: bool, jobs: int
) -> tuple[Columns, NDArray[np.float64], list[CostKeys]]:
    """Simulate the passes of some rows of one deployment.

    Parameters
    ----------
    audited : ndarray of bool, shape (n_rows,)
        Rows of which every pass is audited.

    Returns
    -------
    columns : dict
        What follows from simulation, of every row.
    step_s : ndarray of float64, shape (n_rows,)
    keys : list of CostKeys
        Of every row the compute ops and messages that occur in some pass; rows of the same structures share one object.
    """
    n_passes = len(passes.seq_len)
    audits = np.repeat(audited, passes.n_each)
    of_passes: dict[str, NDArray[np.generic]] = {}
    sent: dict[str, NDArray[np.int64]] = defaultdict(lambda: np.zeros((n_passes, dep.n_chips), np.int64))
    loads, kpis = np.zeros((n_passes, network.n_links)), np.zeros((n_passes, len(KPIS)), object)
    pass_s, which = np.zeros(n_passes), np.zeros(n_passes, np.int64)
    keys: list[CostKeys] = []
    for alike in by_structure(dep, network, passes):
        structure, members = alike.structure, alike.numbers
        template = Template(structure, reduced=reduced)
        (computes,) = price_computes(structure.keys, [(dep, alike.load, len(members))])
        costs = cost_rows(dep, structure.keys, network, alike.load, len(members), computes)
        simulated = simulate_rows(template, costs, jobs)
        fixed_s = fixed_rows(dep, structure.keys, alike.load, len(members), computes)
        columns = results.simulated_columns(dep, network, template, simulated.measures, costs.duration_s, fixed_s)
        columns |= {"n_ops": np.full(len(members), template.n_ops), "n_ops_simulated": simulated.n_ops}
        columns["n_events"] = simulated.n_events
        for name, values in columns.items():
            of_passes.setdefault(name, np.zeros(n_passes, values.dtype))[members] = values
        pass_s[members] = simulated.measures[:, MAKESPAN_S]
        for name in TRAFFIC:
            sent[name][members] = costs.bytes @ _messages_of_chips(structure, name).T
        loads[members] = costs.bytes.astype(np.float64) @ _messages_of_links(structure).T
        for i, number in enumerate(members.tolist()):
            if audits[number]:
                kpis[number] = audit_pass(dep, template, costs, i, passes, number, pass_s[number])
        which[members] = len(keys)
        keys.append(structure.keys)
    step_s = passes.sum(pass_s)
    columns = results.over_passes(dict(of_passes), passes)
    columns |= {name: passes.sum(sent[name]).max(axis=1) for name in TRAFFIC if results.applies(dep, name)}
    columns |= _busiest_link(network, passes.sum(loads), step_s)
    for place, name in enumerate(KPIS):
        total = passes.sum(kpis[:, place])
        columns[name] = [min(int(n), 2**63 - 1) if a else None for n, a in zip(total, audited, strict=True)]
    return columns, step_s, _keys_of_rows(keys, which, passes)


def _keys_of_rows(keys: list[CostKeys], which: NDArray[np.int64], passes: Passes) -> list[CostKeys]:
    """Join the keys of every row's passes; ``which`` of them each pass has."""
    joined: dict[tuple[int, ...], CostKeys] = {}
    of_rows = []
    for row in range(len(passes.first)):
        places = tuple(sorted(set(which[passes.of_row(row)].tolist())))
        if places not in joined:
            joined[places] = CostKeys()
            for place in places:
                joined[places].durations |= keys[place].durations
                joined[places].bytes |= keys[place].bytes
        of_rows.append(joined[places])
    return of_rows


def _messages_of_chips(structure: Structure, column: str) -> NDArray[np.int64]:
    """Count the messages of a traffic column by chip and bytes id, shape (n_chips, n_ids)."""
    reasons, end = TRAFFIC[column]
    n_ids = max(len(structure.keys.bytes), 1)
    total = np.zeros(structure.n_chips * n_ids, np.int64)
    for number, times in Counter(structure.chain).items():
        b = structure.blocks[number]
        chosen = (b.kind == FLOW) & np.isin(b.reason, [REASON[reason] for reason in reasons])
        owner = (b.src if end == "src" else b.dst)[chosen].astype(np.int64)
        total += times * np.bincount(owner * n_ids + b.cost[chosen], minlength=len(total))
    return total.reshape(structure.n_chips, n_ids)


def _messages_of_links(structure: Structure) -> NDArray[np.float64]:
    """Count the messages over each link by bytes id, shape (n_links, n_ids)."""
    n_ids, n_links = max(len(structure.keys.bytes), 1), structure.network.n_links
    total = np.zeros(n_links * n_ids)
    for number, times in Counter(structure.chain).items():
        b = structure.blocks[number]
        crossed = b.route_links.astype(np.int64) * n_ids + np.repeat(b.cost, b.route_length)
        total += times * np.bincount(crossed, minlength=len(total))
    return total.reshape(n_links, n_ids)


def _busiest_link(network: Network, loads: NDArray[np.float64], step_s: NDArray[np.float64]) -> Columns:
    capacity = np.asarray(network.capacities(), float)[network.link_capacity]
    name, use = most_used(network, np.arange(network.n_links), loads / (capacity * step_s[:, None]))
    return {"bottleneck_link": name, "bottleneck_utilisation": use}
