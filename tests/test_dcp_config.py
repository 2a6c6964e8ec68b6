"""Deployed context parallelism: keys, defaults, what is legal, and how refusals read."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from checks import refused
from test_acceptance_tools import MHA, PRESETS, small_model
from test_dcp_bytes import SMALL, deploy

from g5cp_vec import sweep
from g5cp_vec.config.context import gather_workspace_tokens, legal_layouts
from g5cp_vec.config.grid import load_grid
from g5cp_vec.config.model import Attention
from g5cp_vec.errors import InfeasibleError

QWEN, DEEPSEEK = PRESETS["qwen3-235b-a22b"], PRESETS["deepseek-v3-671b"]


def attentions(model):
    return tuple(dict.fromkeys(kind.softmax for kind in model.kinds[0]))


def is_legal(a, tp, pcp, dcp, semantics):
    """The rules as the projects state them, one by one."""
    if a.n_heads % tp or (a.kind == "gqa" and a.n_kv_heads % tp and tp % a.n_kv_heads):
        return False
    if dcp == 1:
        return True
    if semantics == "orthogonal" and pcp > 1:
        return a.kind == "mla" and dcp in (pcp, tp * pcp)
    if a.kind == "mla":
        return tp % dcp == 0
    copies, per_head = tp // a.n_kv_heads, a.n_heads // a.n_kv_heads
    rules = [tp > a.n_kv_heads, dcp <= copies, per_head % dcp == 0, tp % dcp == 0]
    if semantics == "multiplicative":
        rules.append(copies % dcp == 0)
    return all(rules)


ODD = Attention(kind="gqa", n_heads=48, n_kv_heads=4, head_dim=16)
GLM = Attention(kind="gqa", n_heads=96, n_kv_heads=8, head_dim=128)


@pytest.mark.parametrize("semantics", ["multiplicative", "orthogonal"])
@pytest.mark.parametrize("n_chips", [1, 2, 12, 16, 24, 64])
def test_legal_layouts_are_those_of_the_rules(semantics, n_chips):
    for a in (*attentions(QWEN), *attentions(DEEPSEEK), ODD, GLM, MHA):
        divisors = [n for n in range(1, n_chips + 1) if n_chips % n == 0]
        expected = [
            (tp, pcp, dcp)
            for tp, pcp, dcp in itertools.product(divisors, divisors, range(1, n_chips + 1))
            if n_chips % (tp * pcp) == 0 and (pcp == 1 or tp * pcp == n_chips)
            if is_legal(a, tp, pcp, dcp, semantics)
        ]
        assert sorted(legal_layouts((a,), n_chips, semantics)) == sorted(expected)


def test_what_the_guides_say():
    """Qwen3-235B: dcp up to 2 at tp 8, none at tp 4; eight key/value heads: none at tp 8."""
    found = legal_layouts(attentions(QWEN), 16, "multiplicative")
    assert max(dcp for tp, _, dcp in found if tp == 8) == 2
    assert max(dcp for tp, _, dcp in found if tp == 4) == 1
    assert (8, 2, 2) in found
    assert all(dcp == 1 for tp, _, dcp in legal_layouts((GLM,), 8, "multiplicative") if tp == 8)
    # DeepSeek on two nodes: tp 16 alone, or tp 8 twice.
    assert {(16, 1, 16), (8, 2, 8)} <= set(legal_layouts(attentions(DEEPSEEK), 16, "multiplicative"))


# --- Defaults ---------------------------------------------------------------------------------------------------------


def keys_of(**fixed):
    base = {"model": "qwen3-235b-a22b", "chip": "h100-sxm", "topology": "hgx-8", "cp": 1, "seq_len": 4096, "tp": 8,
            "n_chips": 16, "phase": "decode"}  # fmt: skip
    return load_grid({"fixed": base | fixed}, point=True).expand().keys.row(0, named=True)


def test_defaults():
    shown = ("cp_semantics", "interleave", "block_size", "decode_form", "prefill_form", "dp")

    def found(**fixed):
        return tuple(keys_of(**fixed)[key] for key in shown)

    assert found() == (None, None, None, "pass_q", None, 2)
    assert found(pcp=2) == ("multiplicative", 1, 128, "dcp_a2a_fp32", None, 1)
    assert found(dcp=2) == ("multiplicative", 1, 128, "dcp_a2a_fp32", None, 2)
    assert found(dcp=2, cp_semantics="orthogonal") == ("orthogonal", 1, 128, "dcp_ag_rs", None, 2)
    assert found(pcp=2, phase="prefill") == ("multiplicative", 1, 128, None, "allgather_kv", 1)
    assert found(dcp=2, phase="prefill") == ("multiplicative", 1, 128, None, "allgather_q", 2)
    mla = {"model": "deepseek-v3-671b", "phase": "prefill"}
    assert found(dcp=2, **mla) == ("multiplicative", 1, 128, None, "allgather_kv", 2)
    assert found(pcp=2, interleave=64, block_size=64) == ("multiplicative", 64, 64, "dcp_a2a_fp32", None, 1)
    # What is not shared has no shards.
    assert found(interleave=64) == (None, None, None, "pass_q", None, 2)


def test_shown_keys_are_those_of_the_deployment():
    axes = {"phase": ["prefill", "decode"], "pcp": [1, 2], "dcp": [1, 2],
            "cp_semantics": ["multiplicative", "orthogonal"],
            "model": ["qwen3-235b-a22b", "deepseek-v3-671b"]}  # fmt: skip
    fixed = {"chip": "h100-sxm", "topology": "hgx-8", "cp": 1, "seq_len": 4096, "tp": 8, "n_chips": 16}
    expansion = load_grid({"fixed": fixed, "axes": axes}).expand()
    keys = expansion.keys.to_dicts()
    n_valid = 0
    for at, row in enumerate(keys):
        dep = expansion.deployments[expansion.deployment[at]]
        if isinstance(dep, str):
            continue
        n_valid += 1
        for name in ("cp_semantics", "interleave", "block_size", "prefill_form", "decode_form", "dp", "pcp", "dcp"):
            assert row[name] == getattr(dep, name), name
    assert n_valid > 20


def test_a_filter_may_ask_for_defaults():
    fixed = {"model": "qwen3-235b-a22b", "chip": "h100-sxm", "topology": "hgx-8", "cp": 1, "seq_len": 4096, "tp": 8,
             "n_chips": 16, "phase": "decode"}  # fmt: skip
    table = {"fixed": fixed, "axes": {"dcp": [1, 2]}, "points": {"where": "decode_form = 'dcp_a2a_fp32'"}}
    assert load_grid(table).expand().keys["dcp"].to_list() == [2]


# --- Refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "cp and pcp": ({"cp": 2, "pcp": 2}, "cp = 2 and pcp = 2 are two ways to split a context"),
    "cp and dcp": ({"cp": 2, "dcp": 2, "tp": 16}, "cp = 2 and dcp = 2 are two ways"),
    "product": ({"pcp": 2, "dp": 1, "n_chips": 8}, "dp*tp*pp*cp*pcp = 1*8*1*1*2 = 16, but n_chips = 8"),
    "math": ({"pcp": 2, "path": "math"}, "the analytic path has no context parallelism, got pcp = 2"),
    "tp_sp": ({"pcp": 2, "tp_sp": True}, "tp_sp = true and pcp = 2"),
    "dp and pcp": ({"pcp": 2, "dp": 2}, "dp = 2 with pcp = 2 is not deployed"),
    "pp and pcp": ({"pcp": 2, "pp": 2, "cp_semantics": "orthogonal"}, "pp = 2 with pcp = 2 is not deployed"),
    "interleave": ({"dcp": 2, "interleave": 48}, "interleave = 48 does not divide block_size = 128"),
    "long runs": ({"dcp": 2, "interleave": 256}, "interleave = 256 does not divide block_size = 128"),
    "few copies": ({"dcp": 4}, "dcp = 4 exceeds the tp/kv = 8//4 = 2 copies of 4 key/value heads; nearest legal"),
    "no copies": ({"dcp": 2, "tp": 4}, "dcp = 2 needs more tp ranks than 4 key/value heads, got tp = 4"),
    "division": ({"dcp": 3, "model": DEEPSEEK}, "dcp = 3 does not divide tp = 8; nearest legal"),
    "spans": (
        {"dcp": 4, "pcp": 2, "model": DEEPSEEK, "cp_semantics": "orthogonal"},
        "dcp = 4 with pcp = 2 is none of 1, pcp = 2, tp*pcp = 16",
    ),
    "heads over pcp": ({"dcp": 2, "pcp": 2, "cp_semantics": "orthogonal"}, "is deployed for latent attention only"),
    "queries of latents": (
        {"dcp": 2, "model": DEEPSEEK, "prefill_form": "allgather_q"}, "is deployed for grouped-query attention",
    ),
    "queries over copies": (
        {"pcp": 2, "prefill_form": "allgather_q", "cp_semantics": "orthogonal"}, "needs multiplicative semantics",
    ),
    "pass_q": ({"dcp": 2, "phase": "decode", "decode_form": "pass_q"}, "acts on a cp group, got pcp = 1, dcp = 2"),
    "dcp forms on cp": ({"cp": 2, "phase": "decode", "decode_form": "dcp_a2a"}, "acts on pcp and dcp, got cp = 2"),
    "ag_rs over pcp": ({"pcp": 2, "phase": "decode", "decode_form": "dcp_ag_rs"}, "does not merge over pcp = 2"),
    "fp32 over pcp": (
        {"pcp": 2, "dcp": 2, "model": DEEPSEEK, "phase": "decode", "decode_form": "dcp_a2a_fp32",
         "cp_semantics": "orthogonal"}, 'over pcp = 2 is not deployed with orthogonal semantics',
    ),
    "a2a of uneven heads": (
        {"pcp": 32, "dcp": 32, "model": DEEPSEEK, "phase": "decode", "decode_form": "dcp_a2a",
         "cp_semantics": "orthogonal", "ep": 256}, "pcp = 32 does not divide the 16 heads of a rank",
    ),
    "window": (
        {"pcp": 2, "model": small_model(attention=MHA.model_copy(update={"window": 64}))},
        "with a window is not deployed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    changes, message = REFUSED[case]
    with refused(message):
        deploy(**changes)


def test_the_nearest_layouts_are_legal_and_near():
    with pytest.raises(InfeasibleError) as caught:
        deploy(pcp=2, dcp=4)
    named = str(caught.value).split("nearest legal (tp, pcp, dcp): ")[1]
    layouts = [tuple(map(int, part.strip("()").split(", "))) for part in named.split("), (")]
    legal = legal_layouts(attentions(QWEN), 16, "multiplicative")
    assert layouts[0] == (8, 2, 2)
    assert set(layouts) <= set(legal)
    distance = {x: sum(abs(math.log2(a / b)) for a, b in zip(x, (8, 2, 4), strict=True)) for x in legal}
    assert sorted(distance.values())[: len(layouts)] == [distance[x] for x in layouts]


# --- Loads that cannot be ---------------------------------------------------------------------------------------------


def rows(**axes):
    fixed = {"model": "deepseek-v3-671b", "chip": "h200-sxm", "topology": "hgx-8", "phase": "prefill", "cp": 1, "tp": 8,
             "seq_len": "256K", "cached_tokens": "128K", "n_chips": 16, "pcp": 2, "dcp": 8, "ep": 16}  # fmt: skip
    single = {key: values[0] for key, values in axes.items() if len(values) == 1}
    crossed = {key: values for key, values in axes.items() if len(values) > 1}
    grid = {"name": "g", "fixed": {k: v for k, v in (fixed | single).items() if k not in crossed}, "axes": crossed}
    return load_grid(grid).expand()


def test_segments_need_room_for_every_context():
    """S 16, interleave 128, a workspace of 131072: 64 contexts at a time and no more."""
    found = rows(batch=[64, 65], interleave=[128])
    assert found.reason_code.tolist() == [-1, 0]
    assert found.reasons == [
        "batch = 65: cached contexts are gathered over 16 ranks in segments of at least 2048 tokens each, and the "
        "workspace of 131072 tokens has room for 64 of them"
    ]
    assert not rows(batch=[65], interleave=[128], cached_tokens=[0]).reasons
    assert not rows(batch=[65], interleave=[128], phase=["decode"], cached_tokens=[0]).reasons


def test_rings_need_as_many_shards():
    found = rows(prefill_form=["pass_kv"], cached_tokens=[0, 4096])
    assert found.reason_code.tolist() == [-1, 0]
    assert "16 share the cached context" in found.reasons[0]
    assert not rows(prefill_form=["pass_kv"], dcp=[1], cached_tokens=[4096]).reasons
    assert not rows(prefill_form=["pass_kv"], dcp=[2], cp_semantics=["orthogonal"]).reasons
    assert rows(prefill_form=["pass_kv"], dcp=[1], cp_semantics=["orthogonal"]).reasons


def test_passes_meet_the_cache_of_those_before():
    assert not rows(prefill_form=["pass_kv"], dcp=[1], chunk_tokens=[4096]).reasons
    assert rows(prefill_form=["pass_kv"], dcp=[8], cached_tokens=[0], chunk_tokens=[4096]).reasons
    # 8 * 4096 tokens of workspace for 17 contexts: not 2048 for each, in the pass from 2048 to 4096.
    early = rows(batch=[17], interleave=[128], cached_tokens=[0], chunk_tokens=[2048], seq_len=["256K"])
    assert "batch = 17" in early.reasons[0]
    assert not rows(batch=[17], interleave=[128], cached_tokens=[0], chunk_tokens=[16384], seq_len=["256K"]).reasons


def test_workspace_rule():
    """max(min(max(8 length, 4 sequences blocks), cap), sequences blocks)."""
    lengths, batches = np.array([100, 1000, 10**6]), np.array([1, 64, 4096])
    for cap in (65536, 131072):
        found = gather_workspace_tokens(lengths[:, None], batches[None, :], 128, cap)
        for (i, length), (j, batch) in itertools.product(enumerate(lengths.tolist()), enumerate(batches.tolist())):
            expected = max(min(max(8 * length, 4 * batch * 128), cap), batch * 128)
            assert found[i, j] == gather_workspace_tokens(length, batch, 128, cap) == expected


def test_on_a_grid_illegal_layouts_are_rows_with_reasons():
    fixed = {"model": "qwen3-235b-a22b", "chip": "h100-sxm", "topology": "hgx-8", "phase": "decode", "cp": 1,
             "seq_len": 8192, "n_chips": 16, "tp": 8, "pcp": 2, "ep": 16}  # fmt: skip
    frame = sweep({"name": "t", "fixed": fixed, "axes": {"dcp": [1, 2, 4]}}, audit="all")
    assert frame["status"].to_list() == ["ok", "ok", "invalid"]
    assert "nearest legal" in frame["reason"][2]
    assert frame["lost_bytes"].to_list() == [0, 0, None]
    assert SMALL["gqa"].n_layers == 1


@pytest.mark.parametrize(
    ("phase", "forms"),
    [
        ("decode", ["pass_q", "pass_q_ring", "dcp_ag_rs", "dcp_a2a", "dcp_a2a_fp32"]),
        ("prefill", ["pass_kv", "allgather_kv", "allgather_q"]),
    ],
)
def test_without_ranks_to_split_over_forms_are_alike(phase, forms):
    fixed = {"model": "llama-3.1-8b", "chip": "h100-sxm", "topology": "hgx-8", "phase": phase, "cp": 1, "seq_len": 8192,
             "cached_tokens": 4096, "n_chips": 8, "tp": 4, "batch": 3}  # fmt: skip
    frame = sweep({"name": "t", "fixed": fixed, "axes": {f"{phase}_form": forms}}, audit="all")
    apart = {name for name in frame.columns if frame[name].n_unique() > 1}
    assert apart == {"point_id", "row", f"{phase}_form"}
    assert frame["lost_flops"].to_list() == [0] * len(forms)
