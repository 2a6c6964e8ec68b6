"""What an engine is configured for, audited: workspaces that the load by itself would not have."""

from __future__ import annotations

import pytest

from g5cp_vec import run
from g5cp_vec.errors import InfeasibleError

FIXED = {
    "model": "deepseek-v3-671b", "chip": "h200-sxm", "topology": "hgx-8", "phase": "prefill", "cp": 1, "tp": 8,
    "dcp": 8, "interleave": 128, "cached_tokens": 2048, "seq_len": 4096,
}  # fmt: skip


def point(pcp, **changes):
    return run({"name": "p", "fixed": FIXED | {"pcp": pcp, "ep": 8 * pcp, "n_chips": 8 * pcp} | changes})


@pytest.mark.parametrize(("pcp", "most"), [(2, 64), (8, 16)])
def test_as_many_contexts_as_the_configured_workspace_holds(pcp, most):
    """131072 rows at least 128 * shards for each: 64 contexts over 16 shards, 16 over 64; fewer without the key."""
    found = point(pcp, batch=most, max_model_len="128K")
    # One round: a shard's tokens of every context, over a dcp group and then what that gathered over pcp.
    rows = most * max(2048 // (8 * pcp), 128)
    assert found.dcp_bytes == 61 * 7 * rows * 576 * 2
    assert found.lost_bytes == found.lost_flops == found.lost_ops == found.capacity_violations == 0
    assert found.breakdown().step_s == pytest.approx(found.step_s, rel=1e-12)
    with pytest.raises(InfeasibleError, match=f"has room for {most} of them"):
        point(pcp, batch=most + 1, max_model_len="128K")
    with pytest.raises(InfeasibleError, match="has room for"):
        point(pcp, batch=most)


def test_more_sequences_than_are_there_enlarge_the_workspace():
    """vLLM: W = max(min(max(8 * 4096, 4 * 128 * n), 65536), 128 * n) rows, and an eighth beside; n = 1024."""
    keys = {"cp_semantics": "orthogonal", "prefill_form": "allgather_kv", "batch": 33}
    with pytest.raises(InfeasibleError, match="has room for 32 of them"):
        point(1, **keys)
    found = point(1, **keys, max_num_seqs=1024)
    # 3971 rows for each, 3072 of them whole turns of eight ranks: one round.
    assert found.dcp_bytes == 61 * 7 * 33 * 256 * 576 * 2
    assert found.lost_bytes == found.lost_flops == 0
