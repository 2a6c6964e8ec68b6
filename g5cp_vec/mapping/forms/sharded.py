"""Attention with a sharded cache, as vLLM and vllm-ascend deploy it (pcp, dcp): prefill and decode.

Decode: queries are gathered over the ranks of a dcp group, which hold different heads; every rank attends its shard;
partial outputs and their log-sum-exps are exchanged and merged.

- ``dcp_a2a_fp32`` (vllm-ascend): all-to-all of outputs and log-sum-exps in fp32, all-gather over pcp, local merge.
- ``dcp_a2a`` (vLLM): the same with outputs in their own type and the fp32 log-sum-exp in two lanes beside. Where the
  group spans pcp ranks, each merges a pcp-th of the heads that it shares with them, and these are gathered over pcp.
- ``dcp_ag_rs`` (vLLM's default): all-gather of log-sum-exps, outputs rescaled, reduce-scatter over heads; all-reduce
  where the group spans pcp ranks, which hold the same heads.

Prefill: new keys and values are gathered over pcp, used and discarded. Cached context is met in two ways. With
``allgather_q`` queries are gathered, over pcp and then over the heads of a dcp group, and what shards answer goes back
as in decode; the first gathers run beside the attention of head chunks and the exchange beside that of tail chunks
(vllm-ascend), or all of it before the attention of new tokens (vLLM). With ``allgather_kv`` the context is gathered
segment by segment into one workspace, each segment attended before the next is gathered.

Models with linear attention (hybrid) have contiguous pieces of a prompt on pcp ranks. Queries, keys and values are
gathered then, head and tail chunks attended as ever, and outputs gathered for everyone to take those of its piece.

An empty shard takes part in everything, its messages as long as anybody's (it contributes zeros at a log-sum-exp of
minus infinity). Overlap is only where the deployed code has a stream for it. Source: the attention backends of
vllm-ascend v0.13 to v0.23 and of vLLM's second runner.
"""

from __future__ import annotations

from g5cp_vec.config.context import AG_RS, ALLGATHER_Q
from g5cp_vec.mapping.forms.communicators import Sharded
from g5cp_vec.mapping.graph import Ids


def sharded_decode(s: Sharded, ready: Ids) -> list[Ids]:
    """Add a decode step; return what the output projection waits for."""
    if s.shards.max() == 0:
        # Every rank has the whole cache.
        return [s.compute_each("shard", s.shards, ready)]
    queries = s.gather(s.query, [ready], "dcp_q", s.dcp_reason)
    attended = s.compute_each("shard", s.shard_classes(), ready, *queries)
    return merged(s, attended)


def merged(s: Sharded, attended: Ids) -> list[Ids]:
    """Merge the shards' answers to the queries of all ranks; return what carries a rank's own."""
    if s.attends == "chosen" and s.pads:
        # Outputs as they are, and log-sum-exps in a second exchange.
        outputs = s.exchange(s.dcp, [attended], "dcp_a2a", s.dcp_reason)
        sums = s.exchange(s.dcp, [attended, *outputs], "dcp_lse", s.dcp_reason)
        return [s.compute("merge", attended, *outputs, *sums, reason="merge")]
    if s.plan.form != AG_RS and s.plan.form != ALLGATHER_Q:
        if s.plan.dcp_group == "tp":
            return [s.compute("merge", *_exchanged(s, attended), reason="merge")]
        arrived = s.exchange(s.dcp, [attended], "dcp_a2a", s.dcp_reason)
        share = s.compute("merge", attended, *arrived, reason="merge")
        return [share, *s.gather(s.over_pcp, [share], "pcp_heads", s.pcp_reason)]
    sums = s.gather(s.dcp, [attended], "dcp_lse", s.dcp_reason)
    rescaled = s.compute("rescale", attended, *sums, reason="merge")
    if s.plan.dcp_group == "tp":
        # What arrived; a rank's last send is nothing that it waits for.
        arrived = s.scatter(s.dcp, [rescaled], "dcp_out", s.dcp_reason)
    else:
        arrived = s.reduce(s.dcp, [rescaled], "dcp_out", s.dcp_reason)
    return [rescaled, *arrived]


def _exchanged(s: Sharded, attended: Ids) -> list[Ids]:
    """Exchange the shards' answers: all-to-all over a dcp group, then what it made is gathered over pcp."""
    after = [attended, *s.exchange(s.dcp, [attended], "dcp_a2a", s.dcp_reason)]
    return after + s.gather(s.over_pcp, after, "pcp_partial", s.pcp_reason)


def sharded_prefill(s: Sharded, ready: Ids) -> list[Ids]:
    """Add a prefill; return what the output projection waits for."""
    attended = _prefill(s, ready)
    if not s.plan.contiguous:
        return attended
    outputs = s.gather(s.over_pcp, attended, "pcp_exit", s.pcp_reason)
    return [s.compute("exit", *attended, *outputs, reason="attention")]


def _prefill(s: Sharded, ready: Ids) -> list[Ids]:
    arrived: list[Ids] = []
    start = ready
    if s.pcp > 1:
        arrived = s.gather(s.over_pcp, [ready], "pcp_qkv" if s.plan.contiguous else "pcp_kv", s.pcp_reason)
        if not s.pads:
            # Latent and rotary part, or keys and values, one after the other.
            arrived = s.gather(s.over_pcp, [ready, *arrived], "pcp_kv_rest", s.pcp_reason)
        start = s.compute("restore", ready, *arrived)
    if s.plan.form == ALLGATHER_Q and s.reach.rounds:
        return _with_gathered_queries(s, ready, arrived, start)
    # Latents are projected up as far as the tail chunk sees.
    alike = not s.reach.is_ragged and not (s.attends == "latents" and s.pads)
    attended = s.compute_each("attend", s.pcp_classes(alike=alike), start)
    return [_with_segments(s, attended)]


def _with_gathered_queries(s: Sharded, ready: Ids, arrived: list[Ids], start: Ids) -> list[Ids]:
    # One communicator: queries follow keys.
    queries = s.gather(s.over_pcp, [ready, *arrived], "pcp_q", s.pcp_reason)
    queries = [*queries, *s.gather(s.query, [ready, *queries], "dcp_q", s.dcp_reason)]
    if not s.pads:
        attended = s.compute_each("context", s.shard_classes(), ready, *queries)
        answers = merged(s, attended)  # a prefill names no kernel: vLLM's default one
        local = s.compute_each("attend", s.pcp_classes(alike=True), start, *answers)
        return [s.compute("merge_context", local, *answers, reason="merge")]
    name = "head" if s.pcp > 1 else "attend"
    head = s.compute_each(name, s.pcp_classes(alike=s.pcp == 1), start)
    attended = s.compute_each("context", s.shard_classes(), head, *queries)
    tail = attended
    if s.pcp > 1:
        tail = s.compute_each("tail", s.pcp_classes(alike=False), attended)
    return [s.compute("merge_context", tail, *_exchanged(s, attended), reason="merge")]


def _with_segments(s: Sharded, attended: Ids) -> Ids:
    shared = s.shards.max() > 0
    for number in range(s.reach.rounds):
        name = "last" if number == s.reach.rounds - 1 else "full"
        arrived: list[Ids] = []
        if shared:
            # The workspace is free once the segment before has been attended.
            arrived = s.gather(s.dcp, [attended], f"dcp_segment@{name}", s.dcp_reason)
            if s.pads:
                arrived += s.gather(s.over_pcp, [attended, *arrived], f"pcp_segment@{name}", s.pcp_reason)
        attended = s.compute_each(f"segment_{name}", s.pcp_classes(alike=not s.reach.is_ragged), attended, *arrived)
    return attended
