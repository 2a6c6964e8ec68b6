"""Sparse and linear attention with pcp and dcp, from the outside: layouts, defaults, passes, sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_dcp_bytes import deploy
from test_dcp_hybrid import HYBRID
from test_dcp_sparse import MIXED, SMALL

from g5cp_vec import sweep
from g5cp_vec.config.context import legal_layouts, mixers_of
from g5cp_vec.config.grid import load_grid
from g5cp_vec.errors import InfeasibleError

SEMANTICS = ["multiplicative", "orthogonal"]
MODELS = {"sparse": SMALL, "mixed": MIXED, "hybrid": HYBRID}


def is_deployable(**keys):
    try:
        deploy(**keys)
    except InfeasibleError:
        return False
    return True


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_listed_can_be_deployed_and_nothing_else(name, semantics):
    """With the forms that a point defaults to, in both phases."""
    model = MODELS[name]
    listed = set(legal_layouts(mixers_of(model), 8, semantics))
    for tp in (1, 2, 4, 8):
        for pcp in {1, 8 // tp}:
            for dcp in range(1, 9):
                for phase in ("prefill", "decode"):
                    layout = {"tp": tp, "pcp": pcp, "dcp": dcp, "dp": 8 // (tp * pcp)}
                    legal = is_deployable(model=model, phase=phase, cp_semantics=semantics, **layout)
                    assert legal == ((tp, pcp, dcp) in listed), layout


def test_refusals_name_layouts_that_work():
    with pytest.raises(InfeasibleError) as caught:
        deploy(model=HYBRID, tp=4, pcp=2, cp_semantics="orthogonal")
    named = str(caught.value).split("nearest legal (tp, pcp, dcp): ")[1]
    for part in named.split("), ("):
        tp, pcp, dcp = map(int, part.strip("()").split(", "))
        deploy(model=HYBRID, tp=tp, pcp=pcp, dcp=dcp, dp=8 // (tp * pcp), cp_semantics="orthogonal")


def grid(**axes):
    """A grid of small models in place of presets."""
    fixed = {"chip": "h200-sxm", "topology": "hgx-8", "cp": 1, "tp": 4, "ep": 1, "seq_len": 4096, "cached_tokens": 1000,
             "block_size": 16}  # fmt: skip
    single = {key: value[0] for key, value in axes.items() if len(value) == 1}
    crossed = {key: value for key, value in axes.items() if len(value) > 1}
    loaded = load_grid({"name": "g", "fixed": {k: v for k, v in (fixed | single).items() if k not in crossed},
                        "axes": crossed})  # fmt: skip
    for text, model in zip(("deepseek-v3-671b", "qwen3-235b-a22b"), (MIXED, HYBRID), strict=True):
        if ("model", text) in loaded.objects:
            loaded.objects["model", text] = model
    return loaded


def test_shown_keys_are_those_of_the_deployment():
    expansion = grid(
        phase=["prefill", "decode"], pcp=[1, 2], dcp=[1, 2, 4], cp_semantics=SEMANTICS, n_chips=[4, 8],
        model=["deepseek-v3-671b", "qwen3-235b-a22b"],
    ).expand()  # fmt: skip
    shown = ("cp_semantics", "interleave", "block_size", "prefill_form", "decode_form", "pcp", "dcp")
    found = set()
    for at, row in enumerate(expansion.keys.to_dicts()):
        dep = expansion.deployments[expansion.deployment[at]]
        if not isinstance(dep, str):
            found.add(tuple(row[name] for name in ("cp_semantics", "interleave", "prefill_form", "decode_form")))
            assert [row[name] for name in shown] == [getattr(dep, name) for name in shown]
    assert {
        ("multiplicative", 16, "allgather_kv", None), ("orthogonal", 1, "allgather_q", None),
        ("multiplicative", 16, None, "dcp_a2a_fp32"), ("orthogonal", 1, None, "dcp_ag_rs"),
    } <= found  # fmt: skip


def test_short_prompts_are_refused_where_they_would_not_be_split():
    """Orthogonal dcp over pcp ranks: 2 pcp chunks of a prompt, or of its last pass, must all have tokens."""
    axes = {"model": ["deepseek-v3-671b"], "pcp": [2], "n_chips": [8], "phase": ["prefill"], "cp_semantics": SEMANTICS}

    def reasons(seq_len, dcp, chunk=0):
        loaded = grid(**axes, dcp=[dcp], seq_len=[seq_len], cached_tokens=[0], chunk_tokens=[chunk]).expand()
        return [loaded.reasons[code] if code >= 0 else "" for code in loaded.reason_code.tolist()]

    assert reasons(8, 2) == ["", ""]
    assert reasons(5, 4)[0] == ""
    assert "5 new tokens in a pass leave some of the 2*pcp = 4 chunks of a prompt empty" in reasons(5, 2)[1]
    assert reasons(5, 1) == ["", ""]
    assert "1 new tokens in a pass leave" in reasons(1025, 2, 512)[1]
    assert reasons(1024, 2, 512) == ["", ""]


CONFIGS = Path(__file__).parent / "data" / "configs"
SWEEPS = {
    "hybrid": ("Qwen3-Next-80B-A3B-Thinking.json", {"tp": 8, "pcp": 2, "dcp": 4}),
    "blocks": ("DeepSeek-V3.2.json", {"tp": 8, "pcp": 2, "dcp": 8}),
    "shards": ("GLM-5.2-NVFP4.json", {"tp": 8, "pcp": 2, "dcp": 16, "cp_semantics": "orthogonal"}),
    "merged": ("GLM-5.2-NVFP4.json", {"tp": 8, "dcp": 4, "cp_semantics": "orthogonal"}),
}


@pytest.mark.parametrize("case", SWEEPS)
def test_sweeps_of_published_models(case):
    """Every byte and FLOP, in one pass and in several; a longer prompt takes longer, a cached one less."""
    config, layout = SWEEPS[case]
    ranks = layout["tp"] * layout.get("pcp", 1)
    fixed = {"model": str(CONFIGS / config), "chip": "h200-sxm", "topology": "hgx-8", "cp": 1, "n_chips": ranks,
             "phase": "prefill", "ep": ranks}  # fmt: skip
    axes = {"seq_len": [16384, 20001], "chunk_tokens": [0, 8192], "cached_tokens": [0, 9000]}
    frame = sweep({"name": "s", "fixed": fixed | layout, "axes": axes}, audit="all")
    assert set(frame["status"]) <= {"ok", "oom"}
    assert frame["lost_bytes"].to_list() == frame["lost_flops"].to_list() == [0] * len(frame)
    ttft_s = {(r["seq_len"], r["chunk_tokens"], r["cached_tokens"]): r["ttft_s"] for r in frame.to_dicts()}
    for chunk in (0, 8192):
        assert ttft_s[16384, chunk, 0] < ttft_s[20001, chunk, 0]
        assert ttft_s[20001, chunk, 9000] < ttft_s[20001, chunk, 0]
