"""Builds small deployments, plays their graphs with chosen costs, doctors graphs; and tests that it does so.

Everything goes through the package's own builder and kernel: a test sees the graph that a sweep would simulate.
"""

from __future__ import annotations

import json
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import naive
import numpy as np
import pytest
from machines import PLAIN_H200, hgx, switch

from g5cp_vec import sweep
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.deployment import Deployment, build_deployment
from g5cp_vec.config.model import Attention, Model, Moe, load_model
from g5cp_vec.config.topology import Ring
from g5cp_vec.cost.rows import CostRows, cost_rows
from g5cp_vec.engine.arrays import COMPUTE, FLOW, OK, Costs
from g5cp_vec.engine.csr import count_predecessors
from g5cp_vec.engine.measure import no_tags
from g5cp_vec.mapping.graph import REASON, OpGraph
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.structure import Structure, build_structure
from g5cp_vec.runner.simulate import run_graph

PRESETS = {name: load_model(name) for name in ("llama-3.1-8b", "llama-3.1-405b", "qwen3-235b-a22b", "deepseek-v3-671b")}
H200 = load_chip(PLAIN_H200)

MHA = Attention(kind="gqa", n_heads=8, n_kv_heads=8, head_dim=16)
GQA = Attention(kind="gqa", n_heads=8, n_kv_heads=2, head_dim=16)
MLA = Attention(
    kind="mla", n_heads=8, n_kv_heads=8, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=12,
)  # fmt: skip
EXPERTS = Moe(n_experts=16, top_k=2, d_expert=64, n_shared=1)


def small_model(**changes) -> Model:
    """Two dense layers of grouped-query attention, unless told otherwise."""
    fields = {
        "name": "small", "hidden": 64, "vocab": 1000, "n_layers": 2, "d_ff": 128, "attention": GQA, "dtype": "bf16",
    }  # fmt: skip
    return Model(**{**fields, **changes})


DENSE = small_model()
MOE = small_model(name="experts", n_layers=3, moe=EXPERTS, first_dense=1)


def deploy(**changes) -> Deployment:
    """A deployment on as many chips as its degrees ask for; a prefill of `DENSE` on a switch unless told otherwise."""
    keys = {"phase": "prefill", "model": DENSE, "chip": H200, "topology": switch(), "dp": 1, "tp": 1, "pp": 1, "cp": 1}
    keys |= changes
    keys.setdefault("n_chips", keys["dp"] * keys["tp"] * keys["pp"] * keys["cp"])
    return build_deployment(keys)


# --- Reading a graph --------------------------------------------------------------------------------------------------


def edges(ops: OpGraph) -> list[tuple[int, int]]:
    """Every (op, op that waits for it), as often as the arrays name it."""
    g = ops.graph
    preds = np.repeat(np.arange(len(g.op_kind)), np.diff(g.succ_indptr))
    return list(zip(preds.tolist(), g.succ_indices.tolist(), strict=True))


def predecessors(ops: OpGraph) -> dict[int, set[int]]:
    waits = defaultdict(set)
    for before, after in edges(ops):
        waits[after].add(before)
    return waits


def ancestors(waits: dict[int, set[int]], op: int) -> set[int]:
    """Everything that ends before ``op`` starts, given `predecessors`."""
    seen, todo = set(), [op]
    while todo:
        new = waits[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def ops_of(ops: OpGraph, reason: str, kind: int | None = None, layer: int | None = None) -> list[int]:
    chosen = ops.op_reason == REASON[reason]
    if kind is not None:
        chosen &= ops.graph.op_kind == kind
    if layer is not None:
        chosen &= ops.op_layer == layer
    return np.flatnonzero(chosen).tolist()


def flows_between(ops: OpGraph, reason: str, layer: int | None = None, step: int | None = None) -> list[tuple]:
    """Sorted (source chip, destination chip) of the flows of one reason, repeated as often as they occur."""
    found = ops_of(ops, reason, FLOW, layer)
    return sorted((int(ops.op_src[op]), int(ops.op_dst[op])) for op in found if step in (None, ops.op_step[op]))


def bytes_of_ops(structure: Structure, rows: CostRows, row: int = 0) -> np.ndarray:
    """Bytes of every op of one row, 0 for computes; unbounded integers."""
    g = structure.ops.graph
    sizes = [int(n) for n in rows.bytes[row]]
    return np.array([sizes[c] if k == FLOW else 0 for c, k in zip(g.op_cost, g.op_kind, strict=True)], object)


# --- Doctoring a graph ------------------------------------------------------------------------------------------------


def with_edges(ops: OpGraph, add: list[tuple[int, int]] = (), drop: list[tuple[int, int]] = ()) -> OpGraph:
    """The same ops with other edges."""
    kept = sorted((set(edges(ops)) - set(drop)) | set(add))
    n_ops = len(ops.graph.op_kind)
    indptr = np.searchsorted([before for before, _ in kept], np.arange(n_ops + 1)).astype(np.int64)
    indices = np.array([after for _, after in kept], np.int32)
    graph = ops.graph._replace(succ_indptr=indptr, succ_indices=indices, pred_count=count_predecessors(n_ops, indices))
    return ops._replace(graph=graph)


def with_costs(ops: OpGraph, cost_of: dict[int, int]) -> OpGraph:
    """The same ops, some of them with other cost ids."""
    costs = ops.graph.op_cost.copy()
    for op, cost in cost_of.items():
        costs[op] = cost
    return ops._replace(graph=ops.graph._replace(op_cost=costs))


def serialised(ops: OpGraph) -> OpGraph:
    """Let every ring send also wait for the compute of its own step on its rank: the failure to be caught."""
    computed = {}
    for op in ops_of(ops, "attention", COMPUTE):
        computed[int(ops.op_layer[op]), int(ops.op_src[op]), int(ops.op_step[op])] = op
    add = []
    for op in ops_of(ops, "cp_pass_kv"):
        add.append((computed[int(ops.op_layer[op]), int(ops.op_src[op]), int(ops.op_step[op])], op))
    return with_edges(ops, add=add)


# --- Playing a graph --------------------------------------------------------------------------------------------------


def priced(dep: Deployment, structure: Structure, seq_len: int, batch: int = 1, cached_tokens: int = 0) -> CostRows:
    """The package's own costs of one point."""
    one = [np.array([n], np.int64) for n in (seq_len, batch, cached_tokens)]
    return cost_rows(dep, structure.keys, structure.network, build_load(dep, *one), 1)


def chosen_costs(structure: Structure, durations: dict, messages: dict, more: tuple = ()) -> Costs:
    """A row of costs by name, whatever the layer kind; what is not named takes no time and has no bytes.

    ``more`` are further durations, for ids that a doctored graph uses beyond the structure's own.
    """

    def name_of(key):
        return key[0] if isinstance(key, tuple) else key

    known = {name_of(key) for key in (*structure.keys.durations, *structure.keys.bytes)}
    assert set(durations) | set(messages) <= known, "a cost that no op refers to"
    duration_s = [float(durations.get(name_of(key), 0)) for key in structure.keys.durations]
    n_bytes = [float(messages.get(name_of(key), 0)) for key in structure.keys.bytes] or [0.0]
    latencies, capacities = structure.network.latencies(), structure.network.capacities()
    duration_s += map(float, more)
    return Costs(*(np.array(values, float) for values in (duration_s, n_bytes, latencies, capacities)))


def play(ops: OpGraph, costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every op under one row of costs."""
    tags = no_tags(len(ops.op_reason), ops.n_chips)
    _, _, status, times = run_graph(ops.graph, tags, tuple(column[None] for column in costs), keep_times=True)
    assert status[0, 0] == OK
    return tuple(times.times_s[0])


def play_point(dep: Deployment, seq_len: int, batch: int = 1, cached_tokens: int = 0) -> float:
    """Makespan of one point with the package's own costs."""
    structure = build_structure(dep)
    rows = priced(dep, structure, seq_len, batch, cached_tokens)
    return float(play(structure.ops, one_row(rows))[1].max())


def ring_s(ops: OpGraph, start: np.ndarray, finish: np.ndarray, chip: int, layer: int = 0) -> float:
    """From the start of a rank's first ring step to the end of its last."""
    g = ops.graph
    mine = g.chip_ops[g.chip_indptr[chip] : g.chip_indptr[chip + 1]]
    steps = mine[(ops.op_reason[mine] == REASON["attention"]) & (ops.op_layer[mine] == layer)]
    return float(finish[steps].max() - start[steps].min())


# --- Asking the package as a user does --------------------------------------------------------------------------------


def sweep_rows(fixed: dict, fidelity: str = "exact", **axes) -> list[dict]:
    """Rows of a sweep without audit."""
    grid = {"name": "t", "fixed": fixed, "axes": axes, "points": {"on_invalid": "error"}}
    return sweep(grid, audit="none", fidelity=fidelity).to_dicts()


def one_point(fidelity: str = "exact", **fixed) -> dict:
    """The row of one point without audit."""
    (row,) = sweep_rows(fixed, fidelity)
    return row


def write_model(folder: Path, model: Model) -> str:
    """Write a model file and return its path."""
    tables = {"attention": model.attention, "moe": model.moe}
    lines = _toml_lines(model)
    for table, record in tables.items():
        if record is not None:
            lines += [f"[{table}]", *_toml_lines(record)]
    path = folder / f"{model.name}.toml"
    path.write_text("\n".join(lines))
    return str(path)


def _toml_lines(record: Model | Attention | Moe) -> list[str]:
    # 0 and None stand for "has none", which a file says by leaving the key out; tables are the caller's.
    values = {name: getattr(record, name) for name in type(record).model_fields}
    return [f"{name} = {json.dumps(v)}" for name, v in values.items() if v and not isinstance(v, Attention | Moe)]


# --- The package's objects as the naive twins want them ---------------------------------------------------------------


def plain_model(model: Model) -> dict:
    a, moe = model.attention, model.moe
    attention = {"kind": a.kind, "heads": a.n_heads, "kv_heads": a.n_kv_heads, "head_dim": a.head_dim}
    attention |= {"q_rank": a.q_lora_rank, "kv_rank": a.kv_lora_rank, "nope": a.qk_nope_head_dim}
    attention |= {"rope": a.qk_rope_head_dim, "v_dim": a.v_head_dim}
    experts = None
    if moe is not None:
        experts = {"experts": moe.n_experts, "top_k": moe.top_k, "width": moe.d_expert, "shared": moe.n_shared}
    return {
        "hidden": model.hidden, "vocab": model.vocab, "d_ff": model.d_ff, "tied": model.tie_embeddings,
        "layers": [layer.ffn for layer in model.layers], "attention": attention, "moe": experts,
    }  # fmt: skip


def plain_types(dep: Deployment) -> dict[str, str]:
    return {"weights": dep.dtype, "ffn": dep.ffn_dtype, "kv": dep.kv_dtype, "activations": dep.activation_dtype}


def as_workload(structure: Structure, costs: Costs) -> dict:
    """A graph and a row of costs in the format of ``replay`` and of the naive simulation."""
    g = structure.ops.graph
    ops = []
    for op in range(len(g.op_kind)):
        if g.op_kind[op] == COMPUTE:
            secs, prio = float(costs.duration_s[g.op_cost[op]]), int(g.op_rank[op])
            ops.append({"kind": "compute", "chip": int(g.op_chip[op]), "secs": secs, "prio": prio})
        else:
            route = g.route_indices[g.route_indptr[op] : g.route_indptr[op + 1]].tolist()
            n_bytes, lat = float(costs.bytes[g.op_cost[op]]), float(costs.latency_s[g.op_latency[op]])
            ops.append({"kind": "flow", "route": route, "bytes": n_bytes, "lat": lat})
    links = [{"bw": float(costs.capacity_bytes_per_s[c])} for c in g.link_capacity]
    return {"links": links, "chips": structure.ops.n_chips, "ops": ops, "deps": [list(e) for e in edges(structure.ops)]}


def one_row(rows: CostRows) -> Costs:
    return Costs(rows.duration_s[0], rows.bytes[0].astype(float), rows.latency_s[0], rows.capacity[0])


# --- Tests of the above -----------------------------------------------------------------------------------------------


def test_rewriting_the_same_edges_changes_nothing():
    ops = build_structure(deploy(cp=4, tp=2)).ops
    again = with_edges(ops)
    assert sorted(edges(again)) == sorted(edges(ops))
    np.testing.assert_array_equal(again.graph.pred_count, ops.graph.pred_count)


def test_a_dropped_and_an_added_edge_are_seen():
    ops = build_structure(deploy(cp=2)).ops
    first = edges(ops)[0]
    without = with_edges(ops, drop=[first])
    assert set(edges(ops)) - set(edges(without)) == {first}
    assert sorted(edges(with_edges(without, add=[first]))) == sorted(edges(ops))


def test_a_serialised_ring_has_one_more_edge_per_send():
    ops = build_structure(deploy(cp=4, model=small_model(n_layers=3))).ops
    # 3 layers, 4 ranks, 3 sends each.
    assert len(edges(serialised(ops))) - len(edges(ops)) == 3 * 4 * 3


@pytest.mark.parametrize("topology", [switch(4.0, 0.5), hgx(2, 1), hgx(2, 2, over=2), Ring(
    name="r", link_bandwidth_bytes_per_s=2.0, latency_s=0.25)])  # fmt: skip
def test_the_kernel_plays_deployments_as_the_naive_simulation_does(topology):
    # Dyadic costs, so that both are free of rounding wherever shares are halves; thirds differ in the last digits.
    experts = {"tp": 2, "dp": 2, "ep": 4, "model": MOE}
    for changes in ({"cp": 2, "tp": 2}, {"phase": "decode", "cp": 2, "tp": 2}, experts):
        structure = build_structure(deploy(topology=topology, **changes))
        names = {key[0] for key in structure.keys.durations}
        messages = {key[0] if isinstance(key, tuple) else key for key in structure.keys.bytes}
        costs = chosen_costs(structure, dict.fromkeys(names, 3), {name: 2 + len(name) for name in messages})
        _, finish = play(structure.ops, costs)
        makespan, _, expected = naive.simulate(as_workload(structure, costs))
        np.testing.assert_allclose(finish, [float(t) for t in expected], rtol=1e-12)
        assert makespan > Fraction(0)


def test_a_workload_of_a_deployment_is_json():
    structure = build_structure(deploy(cp=2))
    json.dumps(as_workload(structure, chosen_costs(structure, {"ring_step": 1}, {"cp_pass_kv": 1})))


@pytest.mark.parametrize("model", [DENSE, MOE, small_model(name="latent", attention=MLA)], ids=lambda m: m.name)
def test_a_written_model_reads_as_it_was(tmp_path, model):
    assert load_model(write_model(tmp_path, model)) == model
