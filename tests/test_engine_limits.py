"""What an engine is configured for: passes of a budget, refusals, and memory that is reserved for a whole step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from checks import refused
from hypothesis import given
from hypothesis import strategies as st
from test_acceptance_tools import one_point, small_model
from test_dcp_bytes import DEEPSEEK, QWEN, SMALL, deploy, short

from g5cp_vec import run, sweep
from g5cp_vec.config.grid import load_grid
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel
from g5cp_vec.mapping.sharding import segments
from g5cp_vec.runner.passes import split_passes
from g5cp_vec.runner.plan import passes_of_rows, points

FIXED = {
    "model": "llama-3.1-8b", "chip": "h100-sxm", "topology": "hgx-8", "phase": "prefill", "cp": 1, "tp": 8,
    "n_chips": 8, "seq_len": 8192,
}  # fmt: skip


def ceil(a, b):
    return -(-a // b)


def point(**changes):
    return run({"name": "p", "fixed": FIXED | changes})


def expand(**changes):
    axes = {key: value for key, value in changes.items() if isinstance(value, list)}
    fixed = {key: value for key, value in (FIXED | changes).items() if key not in axes}
    return load_grid({"name": "g", "fixed": fixed, "axes": axes} if axes else {"fixed": fixed}).expand()


# --- Passes -----------------------------------------------------------------------------------------------------------


def naive_passes(new, batch, step, chunk):
    """One prompt after another; prompts that fit whole go together, or their chunks do."""
    each = min(chunk or step, new)
    passes, waiting = [], batch
    while waiting:
        together = min(waiting, max(1, step // each))
        done = 0
        while done < new:
            passes.append((together, min(each, new - done), done))
            done += each
        waiting -= together
    return passes


@given(
    st.integers(1, 20_000), st.integers(0, 20_000), st.integers(1, 50), st.integers(1, 30_000), st.booleans(),
    st.sampled_from([0, 1, 100, 4096]),
)  # fmt: skip
def test_passes_are_those_of_prompts_served_as_they_came(new, cached, batch, budget, tp_sp, chunk):
    found = expand(
        seq_len=cached + new, cached_tokens=cached, batch=[batch], max_num_batched_tokens=budget, tp_sp=tp_sp,
        chunk_tokens=chunk,
    )  # fmt: skip
    step = budget
    while tp_sp and step % 8:  # as many tokens on each of the ranks that share them
        step += 1
    if min(chunk, new) > step:
        assert found.reasons == [
            f"chunk_tokens = {chunk} exceeds max_num_batched_tokens = {budget}: use no more than that, or leave it out"
        ]
        return
    assert found.chunk_tokens.tolist() == [chunk or step]
    expected = naive_passes(new, batch, step, chunk)
    assert bool(found.reasons) == (len(expected) > 4096)
    if found.reasons:
        return
    assert passes_of_rows(found).tolist() == [len(expected)]
    passes = split_passes(found.deployments[0], points(found, slice(None)))
    ends = (passes.seq_len - passes.cached_tokens).tolist()
    assert list(zip(passes.batch.tolist(), ends, (passes.cached_tokens - cached).tolist(), strict=True)) == expected
    # Every token of every prompt once, no step fuller than it may be.
    assert sum(n * tokens for n, tokens, _ in expected) == batch * new
    assert max(n * tokens for n, tokens, _ in expected) <= step
    assert passes.held.tolist() == [batch] * len(expected)


@pytest.mark.parametrize(("budget", "n_passes"), [(8192, 1), (4096, 2), (3000, 3)])
def test_a_budget_is_a_chunk_of_a_lone_prompt(budget, n_passes):
    budgeted, chunked = point(max_num_batched_tokens=budget), point(chunk_tokens=budget)
    assert budgeted.n_passes == chunked.n_passes == n_passes
    for name in ("step_s", "tp_bytes", "kv_bytes", "chunk_tokens", "n_ops"):
        assert getattr(budgeted, name) == getattr(chunked, name)


SUMMED = ("step_s", "compute_s", "tp_bytes", "pcp_bytes", "dcp_bytes", "ep_bytes", "n_ops")


@pytest.mark.parametrize("keys", [{}, {
    "model": "deepseek-v3-671b", "tp": 8, "pcp": 2, "dcp": 8, "ep": 16, "n_chips": 16, "interleave": 128,
}])  # fmt: skip
def test_prompts_follow_one_another(keys):
    """Two long prompts take as long, and send as much, as each by itself one after the other."""
    one, two = (point(**keys, max_num_batched_tokens=2048, batch=batch) for batch in (1, 2))
    assert (one.n_passes, two.n_passes) == (4, 8)
    for name in SUMMED:
        if getattr(one, name) is not None:
            assert getattr(two, name) == pytest.approx(2 * getattr(one, name), rel=1e-12)
    assert two.kv_bytes == 2 * one.kv_bytes
    assert (two.activation_bytes, two.buffer_bytes) == (one.activation_bytes, one.buffer_bytes)
    assert two.max_concurrent_seqs == one.max_concurrent_seqs
    assert two.lost_bytes == two.lost_flops == 0
    assert two.breakdown().step_s == pytest.approx(two.step_s, rel=1e-12)


def test_short_prompts_go_together():
    """Five prompts of 1000 tokens in steps of 2048: two, two and one."""
    found = point(seq_len=1000, batch=5, max_num_batched_tokens=2048)
    lots = [point(seq_len=1000, batch=batch).step_s for batch in (2, 2, 1)]
    assert found.n_passes == 3
    assert found.step_s == pytest.approx(sum(lots), rel=1e-12)
    assert found.kv_bytes == 5 * point(seq_len=1000).kv_bytes


def test_a_replica_has_a_step_of_its_own():
    assert point(dp=2, tp=4, max_num_batched_tokens=4096).n_passes == 2


def test_a_step_is_counted_before_pcp_ranks_split_it():
    pcp = point(tp=4, pcp=2, max_num_batched_tokens=4096)
    assert pcp.n_passes == 2
    # A rank brings 2048 rows of two key/value heads to each pass, and to the second the first's from its cache too.
    row = 2 * 2 * 128 * 2
    assert pcp.pcp_bytes == 32 * (2048 + 2048 + 2048) * row + 2 * 2048 * 4096 * 2


def test_decode_steps_have_a_token_of_each():
    found = expand(phase="decode", batch=[256, 257], max_num_batched_tokens=256)
    assert found.reason_code.tolist() == [-1, 0]
    assert found.reasons == [
        "max_num_batched_tokens = 256 has no token of a step for each of batch = 257: raise the limit, or leave it out"
    ]
    assert point(phase="decode", max_num_batched_tokens=256).n_passes is None


def test_a_long_chunk_cuts_nothing():
    """Rules about passes over cached context leave a single pass alone."""
    keys = {"model": "deepseek-v3-671b", "tp": 4, "pcp": 2, "dcp": 4, "ep": 8, "prefill_form": "pass_kv"}
    single = expand(**keys, max_num_batched_tokens=8192)
    assert not single.reasons
    (reason,) = expand(**keys, max_num_batched_tokens=8191).reasons
    assert "8 share the cached context" in reason


# --- Refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "both": (
        {"chunk_tokens": 4096, "max_num_batched_tokens": 2048},
        "chunk_tokens = 4096 exceeds max_num_batched_tokens = 2048: use no more than that, or leave it out",
    ),
    "sequences": ({"batch": 5, "max_num_seqs": 4}, "batch = 5 exceeds max_num_seqs = 4: raise the limit, or"),
    "length": ({"max_model_len": 8191}, "seq_len = 8192 exceeds max_model_len = 8191"),
    "length, decode": ({"max_model_len": 8191, "phase": "decode"}, "seq_len = 8192 exceeds max_model_len = 8191"),
    "passes": ({"max_num_batched_tokens": 1, "seq_len": "8K"}, "are more than 4096 passes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_loads_beyond_the_limits(case):
    changes, message = REFUSED[case]
    with refused(message):
        point(**changes)


def test_both_may_agree():
    limits = {"max_num_batched_tokens": 8192, "max_num_seqs": 4, "max_model_len": 8192}
    agreed = point(chunk_tokens=2048, batch=4, **limits)
    assert (agreed.n_passes, agreed.chunk_tokens) == (4, 2048)
    assert point(chunk_tokens=4096, batch=4, **limits).n_passes == 4  # two prompts at a time, in halves
    # A chunk that is longer than the prompt asks for no more than the prompt.
    assert point(chunk_tokens=16384, max_num_batched_tokens=8192).n_passes == 1


def test_the_limits_are_axes():
    axes = {"max_num_batched_tokens": ["2K", "4K", "16K"], "batch": [1, 4], "max_num_seqs": [1, 4]}
    fixed = {key: value for key, value in FIXED.items() if key not in axes}
    frame = sweep({"name": "t", "fixed": fixed, "axes": axes}, audit="all")
    assert frame["status"].to_list() == ["ok", "ok", "invalid", "ok"] * 3
    assert frame["n_passes"].to_list() == [4, 4, None, 16, 2, 2, None, 8, 1, 1, None, 2]
    assert frame["max_num_batched_tokens"].to_list() == [2048] * 4 + [4096] * 4 + [16384] * 4
    assert frame["lost_flops"].drop_nulls().to_list() == [0] * 9
    ids = frame.filter(frame["status"] == "ok")["point_id"]
    assert ids.n_unique() == len(ids)


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_activations_of_a_whole_step():
    """Llama 3.1 8B, tp 8: residual and copy of 4096, gate and up of 14336 / 8 elements, for every token of the step."""
    for phase in ("prefill", "decode"):
        for budget, tokens in (("16K", 16384), (None, 8192 if phase == "prefill" else 1)):
            limit = {} if budget is None else {"max_num_batched_tokens": budget}
            found = point(phase=phase, **limit)
            assert found.activation_bytes == tokens * (2 * 4096 + 2 * 14336 // 8) * 2


@given(
    st.integers(1, 4000), st.integers(1, 9), st.integers(1, 3000), st.sampled_from([1, 2, 3]),
    st.sampled_from(["multiplicative", "orthogonal"]),
)  # fmt: skip
def test_what_is_reserved_holds_every_load(new, batch, more, pcp, semantics):
    """At least what a pass takes without a limit, never less for a longer prompt, alike for all loads within."""
    keys = {"model": SMALL["gqa"], "tp": 2, "pcp": pcp, "cp_semantics": semantics}
    free = MemoryModel(deploy(**keys))
    budget = batch * new
    engine = MemoryModel(deploy(**keys, max_num_batched_tokens=budget))
    taken, reserved = free.at(new, batch, 0), engine.at(new, batch, 0)
    assert reserved.activation_bytes >= taken.activation_bytes
    assert reserved.buffer_bytes >= taken.buffer_bytes
    assert reserved.kv_bytes == taken.kv_bytes
    longer = engine.at(new + more, batch, more)
    assert longer.activation_bytes == reserved.activation_bytes
    rows = budget if pcp == 1 else ceil(budget, pcp) + 2 * batch
    width = 2 * 64 + max(8 * 24 + 2 * 24, 2 * 128 // 2)
    assert reserved.activation_bytes == rows * width * 2
    if pcp > 1:  # keys and values as gathered and in order, one head of 24 elements each
        assert reserved.buffer_bytes == 2 * pcp * rows * 2 * 24 * 2


def test_gathered_buffers_grow_with_the_step():
    sizes = [
        MemoryModel(
            deploy(model=short(QWEN), pcp=2, dcp=2, moe_dispatch="all_to_all", max_num_batched_tokens=tokens)
        ).at(4096, 1, 0).buffer_bytes
        for tokens in (8192, 16384)
    ]  # fmt: skip
    # Two pads a rank and sequence; 512 bytes a token, twice.
    assert sizes == [2 * 2 * (tokens // 2 + 2) * 512 for tokens in (8192, 16384)]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("keys", [
    {"model": DEEPSEEK, "pcp": 2, "dcp": 8, "ep": 16, "interleave": 128}, {"model": QWEN, "pcp": 2, "ep": 16},
    {"model": QWEN, "dcp": 2, "ep": 8}, {"model": small_model(), "tp": 2, "cp": 2}, {"model": small_model(), "tp": 1},
])  # fmt: skip
def test_longest_context_and_most_sequences(phase, keys):
    model = MemoryModel(deploy(**keys, phase=phase, max_num_batched_tokens=8192))
    chunk = 8192 if phase == "prefill" else 0
    longest = model.max_seq_len(1, 0, chunk)
    cached = (longest - 1) // chunk * chunk if chunk else 0
    assert model.at(longest, 1, cached).peak_bytes <= model.usable_bytes
    lengths = np.array([1000, 10**5, 10**6])
    most = model.max_sequences(lengths, 0 * lengths).tolist()
    for seq_len, n in zip(lengths.tolist(), most, strict=True):
        if n:
            assert model.at(seq_len, n, 0).peak_bytes <= model.usable_bytes
            if n < min(2**20, model.dep.most_tokens // seq_len):
                assert model.at(seq_len, n + 1, 0).peak_bytes > model.usable_bytes


# --- Workspaces -------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 300_000), st.integers(1, 64), st.integers(1, 256), st.integers(0, 10**6),
    st.sampled_from(["multiplicative", "orthogonal"]),
)  # fmt: skip
def test_segments_follow_from_what_is_configured(context, batch, more_seqs, more_len, semantics):
    """W = max(min(max(8 length, 4 sequences blocks), cap), sequences blocks), shared by the gathered contexts."""
    seqs, longest = batch + more_seqs, context + 1 + more_len
    dep = deploy(
        model=SMALL["mla"], tp=4, dcp=4, cp_semantics=semantics, interleave=16, block_size=32,
        max_num_seqs=seqs, max_model_len=longest,
    )  # fmt: skip
    cap = {"multiplicative": 131072, "orthogonal": 65536}[semantics]
    workspace = max(min(max(8 * longest, 4 * seqs * 32), cap), seqs * 32)
    step = math.lcm(32, 16 * 4)
    tokens = workspace // batch // step * step
    if tokens == 0:
        return
    found = segments(dep, build_load(dep, context + 1, batch, context))
    assert found.tokens == tokens
    assert found.rounds == ceil(context, tokens)


def test_an_engine_for_longer_contexts_needs_fewer_segments():
    """17 contexts of 4096 tokens over 16 shards: room for 1927 tokens each if no context is longer, else for 7710."""
    keys = {
        "model": "deepseek-v3-671b", "chip": "h200-sxm", "topology": "hgx-8", "phase": "prefill", "cp": 1, "tp": 8,
        "pcp": 2, "dcp": 8, "n_chips": 16, "ep": 16, "interleave": 128, "batch": 17, "cached_tokens": 2048,
        "seq_len": 4096,
    }  # fmt: skip
    assert "batch = 17" in load_grid({"fixed": keys}, point=True).expand().reasons[0]
    configured = load_grid({"fixed": keys | {"max_model_len": "128K"}}, point=True).expand()
    assert not configured.reasons
    assert one_point(**keys, max_model_len="128K", max_num_seqs=32)["dcp_bytes"] > 0
