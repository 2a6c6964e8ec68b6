"""Chunked prefill with a sharded cache: passes of different structure add up to what they are one by one."""

from __future__ import annotations

import pytest

from g5cp_vec import run, sweep

FIXED = {
    "model": "qwen3-235b-a22b", "chip": "h100-sxm", "topology": "hgx-8", "phase": "prefill", "cp": 1, "tp": 8, "pcp": 2,
    "dcp": 2, "n_chips": 16, "ep": 16, "seq_len": 5000, "batch": 2,
}  # fmt: skip
SUMMED = (
    "step_s", "compute_s", "attention_s", "overhead_s", "comm_s", "exposed_comm_s", "pcp_bytes", "dcp_bytes",
    "tp_bytes", "ep_bytes", "n_ops", "n_events",
)  # fmt: skip
CASES = {
    "queries": {"prefill_form": "allgather_q"},
    "segments": {"model": "deepseek-v3-671b", "dcp": 8},
    "orthogonal": {"model": "deepseek-v3-671b", "dcp": 16, "cp_semantics": "orthogonal"},
    "uneven runs": {"prefill_form": "allgather_q", "interleave": 64},
    "best": {"prefill_form": "allgather_q", "collective": "best"},
    "over cp": {"cp": 2, "pcp": 1, "dcp": 1, "prefill_form": "allgather_q", "ep": 8},
}


def point(**changes):
    return run({"name": "p", "fixed": FIXED | changes})


@pytest.mark.parametrize("case", CASES)
def test_passes_add_up(case):
    whole = point(**CASES[case], chunk_tokens=2048)
    passes = [
        point(**CASES[case], seq_len=min(begin + 2048, 5000), cached_tokens=begin) for begin in range(0, 5000, 2048)
    ]
    if case == "best":  # one choice for all passes; each on its own may have a better one
        alike = [point(**CASES[case] | {"collective": name}, chunk_tokens=2048).step_s for name in ("ring", "direct")]
        assert sum(p.step_s for p in passes) * (1 - 1e-12) <= whole.step_s <= min(alike)
        assert whole.breakdown().step_s == pytest.approx(whole.step_s, rel=1e-12)
        return
    for name in SUMMED:
        parts = [getattr(p, name) for p in passes]
        if parts[0] is None:
            assert getattr(whole, name) is None
        else:
            assert getattr(whole, name) == pytest.approx(sum(parts), rel=1e-12)
    assert whole.peak_bytes == max(p.peak_bytes for p in passes)
    assert whole.max_concurrent_seqs == min(p.max_concurrent_seqs for p in passes)
    assert whole.lost_bytes == whole.lost_flops == whole.order_violations == whole.capacity_violations == 0
    weighted = sum(p.bottleneck_utilisation * p.step_s for p in passes) / whole.step_s
    # The busiest link of all passes together need not be that of each.
    assert whole.bottleneck_utilisation <= weighted * (1 + 1e-9)
    if len({p.bottleneck_link for p in passes}) == 1:
        assert whole.bottleneck_utilisation == pytest.approx(weighted, rel=1e-9)
    assert whole.breakdown().step_s == pytest.approx(whole.step_s, rel=1e-12)


def test_rows_with_and_without_passes_go_together():
    axes = {"chunk_tokens": [0, 1024, 8192], "seq_len": [3000, 5000]}
    fixed = {key: value for key, value in FIXED.items() if key not in axes} | {"prefill_form": "allgather_q"}
    frame = sweep({"name": "t", "fixed": fixed, "axes": axes}, audit="all")
    assert frame["lost_bytes"].to_list() == [0] * 6
    by_key = {(r["chunk_tokens"], r["seq_len"]): r for r in frame.to_dicts()}
    for seq_len in (3000, 5000):
        # A chunk longer than the prompt is no chunk.
        assert by_key[0, seq_len]["step_s"] == by_key[8192, seq_len]["step_s"]
        assert by_key[1024, seq_len]["step_s"] > by_key[0, seq_len]["step_s"]
        alone = point(prefill_form="allgather_q", chunk_tokens=1024, seq_len=seq_len)
        assert alone.step_s == by_key[1024, seq_len]["step_s"]
