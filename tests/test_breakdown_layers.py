"""run --breakdown --layers: layers add up to the step, and what deployments differ in is what the formulas say."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from test_breakdown import BASE, POINTS

import g5cp_vec
from g5cp_vec.cli import main

SEMANTICS = ("multiplicative", "orthogonal")
R1 = {**BASE, "model": "deepseek-r1", "n_chips": 8, "tp": 8, "ep": 8, "cp": 1, "seq_len": 131072}
# One token of 16 heads a rank: queries of 512 + 64 elements of bf16, partial outputs of 512.
HEADS, WIDTH, OUT = 16, 576, 512


def point_file(tmp_path, **keys):
    path = tmp_path / "point.toml"
    path.write_text("[fixed]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    return path


def shown(tmp_path, **changes):
    """Return the breakdown that the command prints as JSON."""
    path = point_file(tmp_path, **changes)
    result = CliRunner().invoke(main, ["run", str(path), "--breakdown", "--layers", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["breakdown"]


def sent(tmp_path, **changes):
    """Return what each layer sends by tensor, those with experts, after checking that all of them send the same."""
    layers = [run for run in shown(tmp_path, **changes)["layers"] if run["name"] == "layer"]
    assert layers[0]["first"] == 0
    assert sum(run["n_layers"] for run in layers) == layers[-1]["last"] + 1
    found = [{s["message"]: s["sent_bytes"] for s in run["sent"]} for run in layers if run["last"] >= 3]
    assert all(one == found[0] for one in found)
    return found[0]


def of_context(messages):
    return {name: n_bytes for name, n_bytes in messages.items() if name[:3] in ("pcp", "dcp")}


def others(messages):
    return {name: n_bytes for name, n_bytes in messages.items() if name[:3] not in ("pcp", "dcp")}


@pytest.mark.parametrize("fidelity", ["exact", "full"])
@pytest.mark.parametrize("name", POINTS)
def test_layers_add_up_to_the_step(name, fidelity):
    result = g5cp_vec.run({"fixed": {**BASE, **POINTS[name]}}, fidelity=fidelity)
    parts = result.breakdown()
    assert sum(run.n_layers * run.seconds for run in parts.layers) == pytest.approx(result.step_s, rel=1e-9)
    waits = [(run.n_layers * w.seconds, w.name) for run in parts.layers for w in run.waits]
    exposed = sum(seconds for seconds, waited in waits if waited != "other ranks")
    assert exposed == pytest.approx(result.exposed_comm_s, rel=1e-6, abs=1e-12)
    for kind in parts.computes:
        each = [(run.n_layers, c) for run in parts.layers for c in run.computes if c.name == kind.name]
        assert sum(n * c.n_ops for n, c in each) == kind.n_ops
        for field in ("seconds", "gemm_s", "attention_s", "elementwise_s", "fixed_s"):
            total = sum(n * getattr(c, field) for n, c in each)
            assert total == pytest.approx(getattr(kind, field), rel=1e-9, abs=1e-15)
    for kind in parts.sent:
        each = [
            (run.n_layers, s)
            for run in parts.layers
            for s in run.sent
            if (s.name, s.message) == (kind.name, kind.message)
        ]
        assert sum(n * s.sent_bytes for n, s in each) == kind.sent_bytes
        assert sum(n * s.n_messages for n, s in each) == kind.n_messages
    # In these every rank of a stage sends as many bytes to its tp group.
    if POINTS[name].get("pp", 1) == 1 and name != "experts":
        assert sum(s.sent_bytes for s in parts.sent if s.name == "tp") == result.tp_bytes
    for run in parts.layers:
        assert run.shortest_s <= run.seconds * (1 + 1e-12)
        assert run.seconds <= run.longest_s * (1 + 1e-12)
        assert run.exposed_s == pytest.approx(sum(w.seconds for w in run.waits))


def test_layers_of_one_chip_are_their_computes():
    """Nothing is sent or waited for, so a layer lasts from its first start to its last end."""
    point = {**BASE, "model": "llama-3.1-8b", "phase": "prefill", "n_chips": 1, "cp": 1, "seq_len": 4096}
    embed, layers, head = g5cp_vec.run({"fixed": point}).breakdown().layers
    assert [embed.name, layers.name, head.name] == ["embed", "layer", "head"]
    assert (layers.first, layers.last, layers.n_layers) == (0, 31, 32)
    assert layers.span_s == pytest.approx(layers.seconds, rel=1e-9)
    assert layers.sent == layers.waits == []
    assert {c.name for c in layers.computes} == {"qkv", "attention", "o_proj", "ffn"}


def test_a_rank_that_a_ring_keeps_waiting_says_where():
    """The exposed ring is charged to the layers that send it, step by step."""
    point = {**BASE, **POINTS["ring"], "n_chips": 16, "tp": 1, "cp": 16}
    layers = g5cp_vec.run({"fixed": point}).breakdown().layers
    ring = [w for run in layers for w in run.waits if w.name == "cp_pass_kv"]
    assert ring
    assert {w.before for w in ring} <= {f"attention step {step}" for step in range(1, 16)} | {"o_proj", "merge"}
    assert all(run.name == "layer" for run in layers if any(w.name == "cp_pass_kv" for w in run.waits))


def test_merge_kernels_of_a_decode_step(tmp_path):
    """The same context over 8 ranks: fp32 outputs, packed ones, or gathered log-sum-exps and scattered outputs."""
    found = {
        form: sent(tmp_path, **R1, phase="decode", dcp=8, decode_form=form)
        for form in ("dcp_a2a_fp32", "dcp_a2a", "dcp_ag_rs")
    }
    queries = 7 * HEADS * WIDTH * 2
    to_others = 7 * HEADS
    assert of_context(found["dcp_a2a_fp32"]) == {"dcp_q": queries, "dcp_a2a": to_others * (OUT + 1) * 4}
    assert of_context(found["dcp_a2a"]) == {"dcp_q": queries, "dcp_a2a": to_others * (OUT + 2) * 2}
    scattered = {"dcp_q": queries, "dcp_lse": 7 * HEADS * 8 * 4, "dcp_out": to_others * OUT * 2}
    assert of_context(found["dcp_ag_rs"]) == scattered
    totals = {form: sum(messages.values()) for form, messages in found.items()}
    assert totals["dcp_a2a_fp32"] - totals["dcp_a2a"] == 229_824 - 115_136
    assert totals["dcp_a2a"] - totals["dcp_ag_rs"] == 115_136 - (114_688 + 3_584)
    assert others(found["dcp_a2a_fp32"]) == others(found["dcp_a2a"]) == others(found["dcp_ag_rs"])


@pytest.mark.parametrize("form", ["dcp_a2a_fp32", "dcp_a2a", "dcp_ag_rs"])
def test_semantics_agree_without_pcp(tmp_path, form):
    one, other = (
        shown(tmp_path, **R1, phase="decode", dcp=8, decode_form=form, cp_semantics=semantics)
        for semantics in SEMANTICS
    )
    assert one == other


def test_semantics_of_a_decode_step_over_pcp(tmp_path):
    """Multiplicative: over dcp, then over pcp, fp32. Orthogonal: pcp ranks are the dcp group and reduce outputs."""
    point = {**R1, "n_chips": 16, "ep": 16, "pcp": 2, "dcp": 2, "phase": "decode"}
    found = {semantics: sent(tmp_path, **point, cp_semantics=semantics) for semantics in SEMANTICS}
    partial = HEADS * 2 * (OUT + 1) * 4
    assert of_context(found["multiplicative"]) == {
        "dcp_q": HEADS * WIDTH * 2, "dcp_a2a": partial // 2, "pcp_partial": partial,
    }  # fmt: skip
    assert of_context(found["orthogonal"]) == {"dcp_lse": HEADS * 4, "dcp_out": HEADS * OUT * 2}
    assert others(found["multiplicative"]) == others(found["orthogonal"])


def test_semantics_of_a_prompt_over_a_cached_context(tmp_path):
    """65536 cached tokens over four ranks or two: the first gathers over dcp, then over pcp; the second over dcp."""
    point = {**R1, "n_chips": 16, "ep": 16, "pcp": 2, "dcp": 2, "phase": "prefill", "cached_tokens": 65536}
    found = {semantics: sent(tmp_path, **point, cp_semantics=semantics) for semantics in SEMANTICS}
    row, new_rows = WIDTH * 2, 65536 // 2
    assert of_context(found["multiplicative"]) == {
        "pcp_kv": new_rows * row, "dcp_segment@last": 65536 // 4 * row, "pcp_segment@last": 65536 // 2 * row,
    }  # fmt: skip
    assert of_context(found["orthogonal"]) == {
        "pcp_kv": new_rows * OUT * 2, "pcp_kv_rest": new_rows * 64 * 2, "dcp_segment@last": 65536 // 2 * row,
    }  # fmt: skip
    totals = {semantics: sum(messages.values()) for semantics, messages in found.items()}
    assert totals["multiplicative"] - totals["orthogonal"] == 65536 // 4 * row
    assert others(found["multiplicative"]) == others(found["orthogonal"])


def test_prompt_forms_of_grouped_queries(tmp_path):
    """Qwen3-235B, 8192 tokens over a context of 4096: keys gathered, or queries (the published figures)."""
    point = {**BASE, "model": "qwen3-235b-a22b", "n_chips": 16, "tp": 8, "ep": 16, "cp": 1, "pcp": 2, "dcp": 2,
             "phase": "prefill", "seq_len": 12288, "cached_tokens": 4096}  # fmt: skip
    found = {form: sent(tmp_path, **point, prefill_form=form) for form in ("allgather_kv", "allgather_q")}
    mib, row = 2**20, 2 * 128 * 2
    buffer = 8192 * HEADS * 129 * 4
    assert of_context(found["allgather_q"]) == {
        "pcp_kv": 2 * mib, "pcp_q": 8 * mib, "dcp_q": 16 * mib, "dcp_a2a": buffer // 2, "pcp_partial": buffer,
    }  # fmt: skip
    assert of_context(found["allgather_kv"]) == {
        "pcp_kv": 2 * mib, "dcp_segment@last": 4096 // 4 * row, "pcp_segment@last": 4096 // 2 * row,
    }  # fmt: skip
    assert others(found["allgather_q"]) == others(found["allgather_kv"])


def test_the_tables(tmp_path):
    path = point_file(tmp_path, **R1, phase="decode", dcp=8)
    result = CliRunner().invoke(main, ["run", str(path), "--breakdown", "--layers"])
    assert result.exit_code == 0
    for text in ("layers 0-2: 3 x", "layers 3-60: 58 x", "dcp dcp_a2a", "229824", "embed", "head", "from first start"):
        assert text in result.stdout
    plain = json.loads(CliRunner().invoke(main, ["run", str(path), "--breakdown", "--json"]).stdout)
    assert "layers" not in plain["breakdown"]
    alone = CliRunner().invoke(main, ["run", str(path), "--layers"])
    assert alone.exit_code == 2
    assert "--breakdown" in alone.stderr
