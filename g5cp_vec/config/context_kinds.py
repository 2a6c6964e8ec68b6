"""Kinds of layers under context parallelism as deployed: which way sparse and linear attention go, what is refused.

Sparse attention (DSA: DeepSeek-V3.2, GLM-5.x), by semantics and degrees:

- ``replicated`` (multiplicative, pcp = 1, dcp = tp): every rank keeps all keys of the indexer. vllm-ascend from v0.23.
- ``blocks`` (multiplicative, pcp > 1, any dcp that divides tp): cache blocks of keys and latents are gathered over dcp
  and pcp, in prefill the ones that requests refer to, in decode every entry of the block table. vllm-ascend v0.23, as
  first merged for v0.18 (which gathered its whole pool of blocks instead; not modelled).
- ``whole`` (orthogonal, dcp = 1): pcp ranks have copies of the cache. vLLM's second runner, pull request 46570.
- ``merged`` (orthogonal, dcp > 1): keys of the indexer are sharded like latents; every rank chooses of its shard, the
  candidates are merged. Decode, and prefill without pcp. vLLM, pull requests 46076 and 46514.
- ``shards`` (orthogonal, dcp > 1, prefill with pcp): shards are gathered over the dcp group. vLLM, pull request 56157.

Linear attention keeps its states on every rank whatever dcp is (vLLM, pull request 40996). Its layers under pcp are
deployed with multiplicative semantics for Qwen3-Next and Qwen3.5 (vllm-ascend v0.18 to v0.23, pull request 7422): a
gated delta net beside grouped-query attention.

Windows and chunks are refused: vllm-ascend's guide excludes them with dcp; vLLM's cache manager would keep such caches
whole on every rank of a dcp group, but backends that run them so are not merged (pull request 47541 is open, 57260 was
closed); and of pcp nothing public says that it runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from g5cp_vec.config.attention import Attention, Linear

MULTIPLICATIVE, ORTHOGONAL = "multiplicative", "orthogonal"
REPLICATED, BLOCKS, WHOLE, MERGED, SHARDS = "replicated", "blocks", "whole", "merged", "shards"


def sparse_way(semantics: str, pcp: int, dcp: int, phase: str) -> str:
    """Return which way sparse attention goes; see the module."""
    if semantics == MULTIPLICATIVE:
        return REPLICATED if pcp == 1 else BLOCKS
    if dcp == 1:
        return WHOLE
    return SHARDS if pcp > 1 and phase == "prefill" else MERGED


def shares_indexer_keys(semantics: str, pcp: int, dcp: int) -> bool:
    """Whether the ranks that share a cache share the keys of the indexer too."""
    return sparse_way(semantics, pcp, dcp, "decode") in (BLOCKS, MERGED)


def sparse_obstacles(tp: int, pcp: int, dcp: int, semantics: str) -> Iterator[str]:
    """Yield what forbids a layout of sparse attention beyond what forbids it for latents."""
    if semantics == MULTIPLICATIVE and pcp == 1 and dcp not in (1, tp):
        yield f"dcp = {dcp} of sparse attention must be tp = {tp} (or 1): its indexer is replicated over the group"


def sparse_form_obstacles(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield what forbids the forms of a model with sparse attention."""
    pcp, dcp, semantics = (chosen[key] for key in ("pcp", "dcp", "cp_semantics"))
    if pcp * dcp == 1 or not has_sparse(chosen["model"]):
        return
    prefill, decode = chosen["prefill_form"], chosen["decode_form"]
    if semantics == MULTIPLICATIVE and decode in ("dcp_ag_rs", "dcp_a2a"):
        yield f'decode_form = "{decode}" of sparse attention is not deployed: use "dcp_a2a_fp32"'
    if semantics == ORTHOGONAL and dcp > 1 and decode == "dcp_a2a_fp32":
        yield f'decode_form = "{decode}" of sparse attention with orthogonal semantics is not deployed: use "dcp_ag_rs"'
    if prefill == "pass_kv":
        yield f'prefill_form = "{prefill}" of sparse attention with pcp or dcp is not deployed: use "allgather_kv"'
    if prefill is None or sparse_way(semantics, pcp, dcp, "prefill") != MERGED:
        return
    if not is_sparse_only(chosen["model"]):
        yield (
            f"sparse beside full attention with dcp = {dcp}: queries of the one would be gathered and latents of the "
            f'other, which is not modelled: use cp_semantics = "{MULTIPLICATIVE}" or dcp = 1'
        )
    elif prefill != "allgather_q":
        yield f'prefill_form = "{prefill}" of sparse attention with dcp = {dcp} is not deployed: use "allgather_q"'


def linear_obstacles(mixers: Iterable[Attention | Linear], pcp: int, semantics: str) -> Iterator[str]:
    """Yield what forbids linear attention among the mixers of a model."""
    mixers = tuple(mixers)
    kinds = sorted({m.kind for m in mixers if isinstance(m, Linear)})
    if pcp == 1 or not kinds:
        return
    if semantics == ORTHOGONAL:
        yield (
            f"linear attention with pcp = {pcp} is not deployed with orthogonal semantics (vLLM splits prompts of "
            f'softmax attention only): use pcp = 1, or cp_semantics = "{MULTIPLICATIVE}"'
        )
    elif kinds != ["gated_delta_net"] or any(isinstance(m, Attention) and m.kind == "mla" for m in mixers):
        other = next((kind for kind in kinds if kind != "gated_delta_net"), "gated_delta_net beside latent attention")
        yield (
            f"linear attention ({other}) with pcp = {pcp} is not deployed: vllm-ascend hands over states of a "
            "gated_delta_net beside grouped-query attention (Qwen3-Next, Qwen3.5), use pcp = 1"
        )


def linear_form_obstacles(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield what forbids the form of a model with linear attention."""
    if chosen["pcp"] > 1 and has_linear(chosen["model"]) and chosen["prefill_form"] == "pass_kv":
        yield (
            'prefill_form = "pass_kv" of a model with linear attention over pcp is not deployed: '
            'use "allgather_kv" or "allgather_q"'
        )


def has_sparse(model: Any) -> bool:
    """Whether some layer chooses the tokens that it attends."""
    return any(kind.softmax is not None and kind.softmax.span == "sparse" for kind in model.kinds[0])


def is_sparse_only(model: Any) -> bool:
    """Whether every softmax attention chooses the tokens that it attends, and there is one."""
    return has_sparse(model) and all(k.softmax is None or k.softmax.span == "sparse" for k in model.kinds[0])


def has_linear(model: Any) -> bool:
    """Whether some layer keeps a state in place of a cache."""
    return any(kind.linear is not None for kind in model.kinds[0])
