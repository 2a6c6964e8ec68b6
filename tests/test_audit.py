"""The audit finds nothing in sound simulations."""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_acceptance_tools import play

from g5cp_vec.audit.conservation import Kpis, audit
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.deployment import Deployment, build_deployment
from g5cp_vec.config.model import load_model
from g5cp_vec.config.topology import Ring, load_topology
from g5cp_vec.cost.flops import edge_parts, layer_parts
from g5cp_vec.cost.messages import message_bytes
from g5cp_vec.cost.roofline import op_seconds
from g5cp_vec.engine.arrays import Costs
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.mapping.graph import REASON
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.structure import Structure, build_structure

SOUND = Kpis(0, 0, 0, 0, 0, 0)
TOPOLOGIES = {
    "ring": Ring(name="ring", link_bandwidth_bytes_per_s=5e10, latency_s=1e-6),
    "no-latency": Ring(name="no-latency", link_bandwidth_bytes_per_s=5e10, latency_s=0.0),
}


class Run(NamedTuple):
    dep: Deployment
    structure: Structure
    load: tuple[int, int, int]
    start_s: np.ndarray
    finish_s: np.ndarray

    def audit(self, ran=None):
        return audit(self.dep, self.structure, *self.load, self.start_s, self.finish_s, ran)

    def doctor(self, *, start=None, finish=None, ops=None, **graph):
        """Return a copy with other times of single ops, other tags of ops, or other arrays of the graph."""
        start_s, finish_s = self.start_s.copy(), self.finish_s.copy()
        for times, changes in ((start_s, start or {}), (finish_s, finish or {})):
            for op, time in changes.items():
                times[op] = time
        old = self.structure.ops
        new = old._replace(graph=old.graph._replace(**graph), **(ops or {}))
        # The whole graph is derived from blocks; a doctored one takes its place.
        structure = copy.copy(self.structure)
        vars(structure)["ops"] = new
        return self._replace(structure=structure, start_s=start_s, finish_s=finish_s)

    def find(self, reason, **tags):
        """Return the ops of a reason whose tags (layer, step, src, dst) have the values given."""
        ops = self.structure.ops
        found = ops.op_reason == REASON[reason]
        for tag, value in tags.items():
            found &= getattr(ops, f"op_{tag}") == value
        return np.flatnonzero(found)

    def n_bytes(self, op):
        by_id = {i: key for key, i in self.structure.keys.bytes.items()}
        key = by_id[int(self.structure.ops.graph.op_cost[op])]
        return message_bytes(self.dep, build_load(self.dep, *self.load), self.dep.model.kinds[0], key)

    def flops(self, op):
        by_id = {i: key for key, i in self.structure.keys.durations.items()}
        key = by_id[int(self.structure.ops.graph.op_cost[op])]
        return sum(part.flops for part in parts_of(self.dep, build_load(self.dep, *self.load))[key])

    def rewired(self, drop, add=()):
        """Return a copy without the dependencies ``drop`` and with ``add``, both lists of (pred, succ)."""
        graph = self.structure.ops.graph
        pred = np.repeat(np.arange(len(graph.op_kind)), np.diff(graph.succ_indptr))
        edges = set(zip(pred.tolist(), graph.succ_indices.tolist(), strict=True))
        assert set(drop) <= edges
        edges = sorted((edges - set(drop)) | set(add))
        pred, succ = np.array(edges, np.int64).T
        indptr = np.searchsorted(pred, np.arange(len(graph.op_kind) + 1))
        return self.doctor(succ_indptr=indptr, succ_indices=succ.astype(np.int32))


def parts_of(dep, load):
    parts = {(name, None): part for name, part in edge_parts(dep, load).items()}
    for i, kind in enumerate(dep.model.kinds[0]):
        parts |= {(name, i): part for name, part in layer_parts(dep, load, kind).items()}
    return parts


def deployment(model="llama-3.1-8b", topology="flat-450", **values):
    loaded = load_model(model)
    shape = {name: values.pop(name) for name in ("n_layers", "hidden") if name in values}
    loaded = loaded.model_copy(update=shape)
    objects = {
        "model": loaded,
        "chip": load_chip("h200-sxm"),
        "topology": TOPOLOGIES.get(topology) or load_topology(topology),
    }
    return build_deployment({"phase": "prefill", "cp": 1, **values, **objects})


def simulated(dep, seq_len=4096, batch=1, cached_tokens=0, structure=None):
    structure = structure or build_structure(dep)
    load = build_load(dep, seq_len, batch, cached_tokens)
    kinds = dep.model.kinds[0]
    parts = parts_of(dep, load)
    costs = Costs(
        np.array([float(op_seconds(dep, parts[key])) for key in structure.keys.durations]),
        np.array([float(message_bytes(dep, load, kinds, key)) for key in structure.keys.bytes], np.float64),
        np.array(structure.network.latencies()),
        np.array(structure.network.capacities()),
    )
    return Run(dep, structure, (seq_len, batch, cached_tokens), *play(structure.ops, costs))


LLAMA = {"n_layers": 3}
DEEPSEEK = {"model": "deepseek-v3-671b", "n_layers": 5}
QWEN = {"model": "qwen3-235b-a22b", "n_layers": 3}
SOUND_CASES = [
    ({"n_chips": 1}, {}),
    ({"n_chips": 1, "phase": "decode"}, {"batch": 3}),
    ({**LLAMA, "n_chips": 8, "cp": 8}, {"seq_len": 8192}),
    ({**LLAMA, "n_chips": 8, "cp": 4, "tp": 2}, {"seq_len": 5003, "batch": 2}),
    ({**LLAMA, "n_chips": 8, "cp": 2, "tp": 4, "collective": "direct"}, {"seq_len": 999, "cached_tokens": 333}),
    ({**LLAMA, "n_chips": 16, "tp": 16, "kv_dtype": "int4"}, {"seq_len": 77, "cached_tokens": 9}),
    ({**LLAMA, "n_chips": 8, "cp": 2, "tp": 2, "pp": 2, "topology": "ring"}, {"seq_len": 5000}),
    ({**LLAMA, "n_chips": 16, "cp": 4, "dp": 4, "topology": "ring", "rank_order": ["dp", "tp", "cp", "pp"]}, {}),
    ({**LLAMA, "n_chips": 8, "cp": 8, "topology": "no-latency"}, {"seq_len": 100}),
    ({**LLAMA, "n_chips": 8, "cp": 4, "tp": 2, "phase": "decode"}, {"seq_len": 10001, "batch": 5}),
    ({**LLAMA, "n_chips": 8, "cp": 2, "pp": 2, "tp": 2, "phase": "decode", "topology": "ring"}, {"batch": 2}),
    ({"n_chips": 8, "tp": 2, "tp_sp": True}, {"seq_len": 1023}),
    ({**LLAMA, "n_chips": 4, "tp": 4, "hidden": 4097, "activation_dtype": "fp4"}, {"seq_len": 51}),
    ({**LLAMA, "n_chips": 32, "cp": 4, "tp": 2, "topology": "hgx-8-oversub2"}, {"seq_len": 2**20}),
    ({**DEEPSEEK, "n_chips": 16, "cp": 4, "tp": 2, "ep": 4, "topology": "hgx-8"}, {"seq_len": 2049, "batch": 3}),
    ({**DEEPSEEK, "n_chips": 16, "cp": 2, "tp": 2, "ep": 2, "topology": "hgx-8"}, {"cached_tokens": 1001}),
    ({**DEEPSEEK, "n_chips": 16, "tp": 2, "ep": 4, "collective": "direct", "topology": "hgx-8-oversub2"}, {}),
    ({**DEEPSEEK, "n_chips": 8, "cp": 2, "tp": 4, "ep": 1, "kv_dtype": "fp8"}, {"seq_len": 1237}),
    ({**DEEPSEEK, "n_chips": 16, "cp": 4, "tp": 2, "ep": 4, "phase": "decode", "topology": "hgx-8"}, {"batch": 7}),
    ({**DEEPSEEK, "n_chips": 32, "cp": 4, "tp": 2, "pp": 2, "phase": "decode", "topology": "hgx-8"}, {}),
    ({**DEEPSEEK, "n_chips": 4, "tp": 2, "pp": 2}, {"cached_tokens": 1}),
    ({**QWEN, "n_chips": 16, "cp": 4, "tp": 2, "ep": 4, "topology": "hgx-8"}, {"seq_len": 10007}),
    ({**QWEN, "n_chips": 16, "tp": 8, "ep": 4, "ffn_dtype": "fp4", "activation_dtype": "fp8"}, {"seq_len": 17}),
    ({**QWEN, "n_chips": 32, "tp": 2, "cp": 2, "ep": 4, "rank_order": ["cp", "dp", "pp", "tp"]}, {}),
    ({**QWEN, "n_chips": 16, "cp": 2, "tp": 8, "ep": 8, "phase": "decode", "collective": "direct"}, {"batch": 2}),
]


@pytest.mark.parametrize(("values", "load"), SOUND_CASES)
def test_conservation(values, load):
    run = simulated(deployment(**values), **load)
    assert run.audit() == SOUND
    assert run.audit(np.ones(len(run.start_s), np.int8)) == SOUND


def test_conservation_of_the_specification_s_use_case():
    dep = deployment("deepseek-v3-671b", n_chips=64, tp=2, cp=8, topology="hgx-8")
    run = simulated(dep, seq_len=2**20)
    assert len(run.start_s) > 100_000
    assert run.audit() == SOUND


@given(data=st.data())
@settings(max_examples=60)
def test_conservation_of_any_deployment(data):
    def pick(*choices):
        return data.draw(st.sampled_from(choices))

    values = {
        **pick({"n_layers": 2}, {**DEEPSEEK, "n_layers": 4}, {**QWEN, "n_layers": 2}),
        "phase": pick("prefill", "decode"),
        "topology": pick("ring", "no-latency", "flat-450", "hgx-8", "hgx-8-oversub2"),
        "rank_order": data.draw(st.permutations(["tp", "cp", "pp", "dp"])),
        "collective": pick("ring", "direct"),
        "kv_dtype": pick("bf16", "int4"),
        "activation_dtype": pick("bf16", "fp8"),
        **{axis: pick(1, 2, 4) for axis in ("tp", "cp", "dp")},
        "pp": pick(1, 2),
        "ep": pick(1, 2, 4),
    }
    values["n_chips"] = values["tp"] * values["cp"] * values["dp"] * values["pp"]
    try:
        dep = deployment(**values)
    except InfeasibleError:
        assume(False)
    cached = 0 if dep.phase == "decode" else data.draw(st.integers(0, 300))
    assert simulated(dep, cached + data.draw(st.integers(1, 3000)), pick(1, 3), cached).audit() == SOUND
