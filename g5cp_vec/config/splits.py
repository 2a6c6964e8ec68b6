"""Whether tp ranks can share a model's layers, and those of dp * tp its experts; where not, how many can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from g5cp_vec.config._nearest import divisors, nearest
from g5cp_vec.config.context import nearest_layouts
from g5cp_vec.config.layers import LayerKind, Moe


def split_obstacles(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield what forbids to split the layers so, each with the nearest degrees that can be."""
    for obstacle in _obstacles(chosen):
        yield obstacle + (_other_tp(chosen) if obstacle.startswith("tp ") else _other_ep(chosen))


def _other_tp(chosen: Mapping[str, Any]) -> str:
    """Name degrees that the same ranks allow, dp taking what is left."""
    if chosen["pcp"] * chosen["dcp"] > 1:
        return f"; {nearest_layouts(chosen)}"
    ranks = chosen["dp"] * chosen["tp"]
    reasons = {tp: list(_obstacles({**chosen, "tp": tp, "dp": ranks // tp})) for tp in divisors(ranks)}
    whole = [tp for tp, found in reasons.items() if not found]
    # Experts may be in the way of all of them; their degree is then the next to choose.
    for_tp = [tp for tp, found in reasons.items() if not any(reason.startswith("tp ") for reason in found)]
    return nearest("tp", chosen["tp"], whole or for_tp)


def _other_ep(chosen: Mapping[str, Any]) -> str:
    ranks = chosen["dp"] * chosen["tp"] * chosen["pcp"]
    fitting = [ep for ep in divisors(ranks) if not any(_obstacles({**chosen, "ep": ep}))]
    return nearest("ep", chosen["ep"], fitting) or f"; no ep would do for {ranks} ranks"


def _obstacles(chosen: Mapping[str, Any]) -> Iterable[str]:
    return dict.fromkeys(reason for kind in chosen["model"].kinds[0] for reason in _layer_obstacles(chosen, kind))


def _layer_obstacles(chosen: Mapping[str, Any], kind: LayerKind) -> Iterator[str]:
    """Yield what forbids splitting a layer over the tp ranks, and its experts over those of dp * tp."""
    tp = chosen["tp"]
    if (a := kind.softmax) is not None:
        if a.n_heads % tp:
            yield f"tp = {tp} does not divide {a.n_heads} attention heads"
        if a.kind == "gqa" and a.n_kv_heads % tp and tp % a.n_kv_heads:
            yield f"tp = {tp} neither divides nor is a multiple of {a.n_kv_heads} key/value heads"
    elif (m := kind.linear) is not None:
        for what, n in (("heads", m.n_heads), ("key heads", m.n_key_heads)):
            if n % tp:
                yield f"tp = {tp} does not divide {n} {what} of linear attention"
    if kind.d_ff % tp:
        yield f"tp = {tp} does not divide d_ff = {kind.d_ff}"
    if kind.moe is not None:
        yield from _expert_obstacles(chosen, kind.moe)


def _expert_obstacles(chosen: Mapping[str, Any], moe: Moe) -> Iterator[str]:
    """Yield what forbids laying the experts over the dp * tp ranks."""
    dp, tp, ep, pcp = chosen["dp"], chosen["tp"], chosen["ep"], chosen["pcp"]
    ranks, name = dp * tp * pcp, "dp*tp" if pcp == 1 else "dp*tp*pcp"
    if ranks % ep:
        degrees = f"{dp}*{tp}" if pcp == 1 else f"{dp}*{tp}*{pcp}"
        yield f"ep = {ep} does not divide {name} = {degrees} = {ranks}"
        return  # without a whole moe_tp there is nothing more to say
    moe_tp = ranks // ep
    if moe.n_experts % ep:
        yield f"ep = {ep} does not divide {moe.n_experts} experts"
    if moe.d_expert % moe_tp:
        yield f"moe_tp = {name}/ep = {moe_tp} does not divide d_expert = {moe.d_expert}"
    if tp % moe_tp and moe_tp % tp:
        yield f"moe_tp = {name}/ep = {moe_tp} neither divides nor is a multiple of tp = {tp}"
    if moe.shared_width % tp:
        yield f"tp = {tp} does not divide the shared experts' width {moe.shared_width}"
