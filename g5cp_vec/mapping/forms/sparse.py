"""Sparse attention with a sharded cache, as vLLM and vllm-ascend deploy it; its ways: `g5cp_vec.config.context_kinds`.

- ``replicated``: in prefill the blocks of the cache that requests refer to are gathered while tokens are chosen; in
  decode queries are gathered, and outputs come back in their own type, log-sum-exps in an exchange of their own.
- ``blocks``: new latents are gathered over pcp and cached, then new keys of the indexer; cached blocks of these keys
  are gathered over dcp and pcp, tokens chosen, and cached blocks of latents and of their rotary parts gathered too, one
  after the other on one stream. Every rank attends all of the context with its own heads: prefill its own rows,
  decode all rows, which pcp ranks hold alike (their keys are gathered too; the fused projections that vllm-ascend
  offers engines which only decode leave that out).
- ``whole``: keys of the indexer and, once tokens are chosen, latents and rotary parts are gathered over pcp and cached
  by every rank. Decode is local.
- ``merged``: every rank chooses of its shard; candidates are gathered and merged; queries go to the shards, and
  answers come back as in full attention, in prefill with vLLM's default kernel.
- ``shards``: as ``whole``, and what lies on other shards is gathered: keys before choosing, latents before attending.
"""

from __future__ import annotations

from g5cp_vec.config.context_kinds import BLOCKS, MERGED, REPLICATED, SHARDS, sparse_way
from g5cp_vec.mapping.forms.communicators import Sharded
from g5cp_vec.mapping.forms.sharded import merged, sharded_decode
from g5cp_vec.mapping.graph import Ids


def _way(s: Sharded, phase: str) -> str:
    assert s.plan.semantics is not None
    return sparse_way(s.plan.semantics, s.pcp, s.plan.dcp, phase)


def sparse_prefill(s: Sharded, ready: Ids) -> list[Ids]:
    """Add a prefill; return what the output projection waits for."""
    way = _way(s, "prefill")
    if way == REPLICATED:
        blocks = s.gather(s.dcp, [ready], "dcp_blocks", s.dcp_reason)
        scored = s.compute("indexer@0", ready) if s.scores else ready
        return [s.compute("sparse@0", scored, *blocks)]
    if way == BLOCKS:
        return _over_blocks(s, ready, alike=False)
    if way == MERGED:
        chosen = _merged_choice(s, ready)
        queries = s.gather(s.query, [chosen], "dcp_q", s.dcp_reason)
        return merged(s, s.compute_each("sparse", s.shard_classes(), chosen, *queries))
    return _over_own_rows(s, ready, shards=way == SHARDS)


def sparse_decode(s: Sharded, ready: Ids) -> list[Ids]:
    """Add a decode step; return what the output projection waits for."""
    way = _way(s, "decode")
    if way == BLOCKS:
        return _over_blocks(s, ready, alike=True)
    return sharded_decode(s, _merged_choice(s, ready) if way == MERGED else ready)


def _merged_choice(s: Sharded, ready: Ids) -> Ids:
    """Add the choice on every shard and its merging; nothing where the layer takes the choice of another."""
    if not s.scores:
        return ready
    scored = s.compute_each("indexer", s.shard_classes(), ready)
    candidates = s.gather(s.dcp, [scored], "dcp_choice", s.dcp_reason)
    return s.compute("choose", scored, *candidates)


def _over_blocks(s: Sharded, ready: Ids, *, alike: bool) -> list[Ids]:
    latest = s.compute("restore", ready, *s.gather(s.over_pcp, [ready], "pcp_kv", s.pcp_reason))
    if s.scores:
        keys = s.gather(s.over_pcp, [latest], "pcp_index", s.pcp_reason)
        latest = s.compute("restore_index", latest, *keys)
        latest = s.compute("indexer@0", latest, *_all_blocks(s, [latest], "index"))
    latest = s.compute("select", latest)
    latents = _all_blocks(s, [latest], "latent")
    rotary = _all_blocks(s, [latest, *latents], "rope")
    return [s.compute_each("sparse", s.pcp_classes(alike=alike), latest, *latents, *rotary)]


def _all_blocks(s: Sharded, after: list[Ids], what: str) -> list[Ids]:
    over_dcp = s.gather(s.dcp, after, f"dcp_{what}_blocks", s.dcp_reason)
    return over_dcp + s.gather(s.over_pcp, [*after, *over_dcp], f"pcp_{what}_blocks", s.pcp_reason)


def _over_own_rows(s: Sharded, ready: Ids, *, shards: bool) -> list[Ids]:
    latest = ready
    if s.scores:
        keys = s.gather(s.over_pcp, [latest], "pcp_index", s.pcp_reason)
        latest = s.compute("restore_index", latest, *keys)
        others = s.gather(s.dcp, [latest], "dcp_index_shard", s.dcp_reason) if shards else []
        latest = s.compute_each("indexer", s.pcp_classes(alike=not s.reach.is_ragged), latest, *others)
    latents = s.gather(s.over_pcp, [latest], "pcp_kv", s.pcp_reason)
    latents += s.gather(s.over_pcp, [latest, *latents], "pcp_kv_rest", s.pcp_reason)
    latest = s.compute("restore", latest, *latents)
    others = []
    if shards:
        latest = s.compute("select", latest)
        others = s.gather(s.dcp, [latest], "dcp_shard", s.dcp_reason)
    return [s.compute_each("sparse", s.pcp_classes(alike=False), latest, *others)]
