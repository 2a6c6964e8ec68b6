"""One way to split a model over a system: the parallel degrees, the choices of software, and what cannot be.

``dp * tp * pp * cp * pcp = n_chips`` (dcp reuses tp ranks; see `g5cp_vec.config.context`). Experts do not add a factor:
they are laid over the dp * pcp * tp ranks of one (pp, cp) coordinate, ``dp * pcp * tp = moe_tp * ep``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from g5cp_vec.config._keys import DECODE_FORM, DEPLOYMENT_KEYS, KEYS, LOAD_KEYS
from g5cp_vec.config._record import Record, sha256_of_json
from g5cp_vec.config.attention import Attention
from g5cp_vec.config.chip import Chip
from g5cp_vec.config.collectives import BEST, algorithm_of
from g5cp_vec.config.context import (
    BLOCK_SIZE,
    SEMANTICS,
    context_obstacles,
    dcp_group,
    default_decode_form,
    default_dispatch,
    default_interleave,
    default_prefill_form,
    kv_shards,
)
from g5cp_vec.config.dtypes import DTYPE_BITS, Dtype, n_bytes
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.config.limits import step_tokens
from g5cp_vec.config.model import Model
from g5cp_vec.config.runtime import IDEAL, Runtime, load_runtime
from g5cp_vec.config.splits import split_obstacles
from g5cp_vec.config.topology import Topology
from g5cp_vec.errors import InfeasibleError

__all__ = ["DTYPE_BITS", "Deployment", "Dtype", "build_deployment", "n_bytes"]


# Far beyond any deployment; narrower for very wide models.
MOST_TOKENS = 2**36


# Where a deployment keeps the types of a layer's weights.
_FIELDS = {
    "attention": "dtype",
    "ffn": "ffn_dtype",
    "experts": "expert_dtype",
    "o_proj": "o_proj_dtype",
    "kv_b_proj": "kv_b_proj_dtype",
    "indexer": "indexer_dtype",
}
# Of attention: what may be stored otherwise than the rest of it.
_PARTS = ("o_proj", "kv_b_proj", "indexer")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A feasible deployment; make one with :func:`build_deployment`, which checks.

    Attributes
    ----------
    phase : {"prefill", "decode"}
    path : {"g5", "math"}
        Event simulation, or the closed form without context parallelism.
    model, chip, topology, runtime
        The objects, resolved.
    n_chips, dp, tp, pp, cp : int
        Ranks, and their degrees of data, tensor, pipeline and context parallelism.
    pcp, dcp : int
        Prefill and decode context parallelism as deployed; not together with cp > 1.
    cp_semantics : str or None
        Which deployed semantics; this and the next two are None where pcp * dcp = 1.
    interleave, block_size : int or None
        Consecutive tokens on a rank that shares a cache, and tokens of one of its blocks.
    ep, moe_tp : int or None
        Expert parallelism, and the ranks that split one expert; None without experts.
    moe_dispatch : {"all_to_all", "all_gather"} or None
        How tokens come to experts; None without experts.
    max_num_batched_tokens, max_num_seqs, max_model_len : int or None
        What the engine is configured for (`g5cp_vec.config.limits`); None where that follows from the load.
    prefill_form, decode_form : str or None
        How attention is distributed over a cp group, or over pcp and dcp; None in the other phase.
    collective : str
        ``ring`` or ``direct``, of all groups or of each kind (`g5cp_vec.config.collectives`); ``best`` is chosen by
        simulation.
    tp_sp : bool
        Whether tensor-parallel groups reduce-scatter and all-gather in place of all-reduce.
    rank_order : tuple of str
        Dimensions from the fastest varying to the slowest, as ranks are laid on chips.
    dtype, ffn_dtype, kv_dtype, activation_dtype : str
        Element types of weights, of feed-forward weights, of the cache and of activations.
    converted : tuple of str
        Classes of weights whose type the grid says, for every layer alike; empty where no layer of the model is stored
        otherwise than the others.
    o_proj_dtype, kv_b_proj_dtype, indexer_dtype : str
        Of attention's output projection, that of latents up to keys and values, and an indexer's (`dtype` unless the
        checkpoint differs and the grid says nothing).
    expert_dtype, embedding_dtype, head_dtype : str
        Of routed experts (`ffn_dtype` unless the checkpoint differs and the grid says nothing), of the embedding table
        and of the head (`activation_dtype` unless the checkpoint differs).
    """

    phase: str
    path: str
    model: Model
    chip: Chip
    topology: Topology
    runtime: Runtime
    n_chips: int
    dp: int
    tp: int
    pp: int
    cp: int
    pcp: int
    dcp: int
    cp_semantics: str | None
    interleave: int | None
    block_size: int | None
    ep: int | None
    moe_tp: int | None
    moe_dispatch: str | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    max_model_len: int | None
    prefill_form: str | None
    decode_form: str | None
    collective: str
    tp_sp: bool
    rank_order: tuple[str, str, str, str]
    dtype: str
    ffn_dtype: str
    kv_dtype: str
    activation_dtype: str
    converted: tuple[str, ...]
    o_proj_dtype: str
    kv_b_proj_dtype: str
    indexer_dtype: str
    expert_dtype: str
    embedding_dtype: str
    head_dtype: str

    @property
    def has_owner(self) -> bool:
        """Whether one rank of each cp group, coordinate 0, holds the tokens, and the others only attend."""
        return self.phase == "decode" and self.decode_form == DECODE_FORM

    @property
    def is_sharded(self) -> bool:
        """Whether the context is split as deployed (pcp, dcp)."""
        return self.pcp * self.dcp > 1

    @property
    def sequence_ranks(self) -> int:
        """Ranks that the new tokens of a sequence are split over in prefill."""
        return self.cp * self.pcp

    @property
    def kv_shards(self) -> int:
        """Ranks that share one copy of a cache."""
        return kv_shards(self.pcp, self.dcp, self.cp_semantics) if self.cp_semantics is not None else self.cp

    @property
    def dcp_group(self) -> str:
        """Which ranks form a dcp group: ``tp`` (consecutive ones of a tp group), ``pcp``, or ``all`` of both."""
        return dcp_group(self.tp, self.pcp, self.dcp, self.cp_semantics or SEMANTICS[0])

    @property
    def step_tokens(self) -> int | None:
        """Most new tokens of a step of a dp replica; None without a limit."""
        if self.max_num_batched_tokens is None:
            return None
        return step_tokens(self.max_num_batched_tokens, self.tp * self.pcp, splits_tokens=self.tp_sp)

    def algorithm(self, group: str) -> str:
        """Return the algorithm of the collectives of one kind of group."""
        return algorithm_of(self.collective, group)

    @property
    def replicas(self) -> int:
        """Sets of tp ranks at one (pp, cp) coordinate, over which experts are laid."""
        return self.dp * self.pcp

    @cached_property
    def most_tokens(self) -> int:
        """Tokens of all replicas at once for which every byte count of a step stays inside int64.

        Bounds the widest moment of a layer in bits, the cache of all layers, and all layers' traffic of one kind.
        """
        model = self.model
        distinct, sequence = model.kinds
        widest = 16 * (2 * model.hidden + max(_widest_elements(model.hidden, kind) for kind in distinct))
        cache = 4 * sum(n * _cache_elements(distinct[i]) for i, n in Counter(sequence).items())
        traffic = model.n_layers * (8 * model.hidden + 4 * model.top_k * model.hidden)
        if self.is_sharded:
            # Partial outputs in fp32, of all heads, to every rank that shares the cache.
            heads = max((4 * k.softmax.n_heads * _output_width(k.softmax) for k in distinct if k.softmax), default=0)
            traffic = max(traffic, 2 * self.pcp * self.dcp * model.n_layers * heads)
        return min(MOST_TOKENS, 2**62 // max(widest, cache, traffic))

    def of_layer(self, kind: LayerKind) -> Deployment:
        """Return the same deployment with the element types that one layer is stored in."""
        if kind.dtypes is None:
            return self
        own, of_model = kind.dtypes.model_dump(exclude_none=True), self.model.dtypes
        if "attention" in own:
            # What the model says nothing of is as the rest of the layer's attention.
            for part in _PARTS:
                if of_model is None or getattr(of_model, part) is None:
                    own.setdefault(part, own["attention"])
        types = {_FIELDS[weights]: dtype for weights, dtype in own.items() if weights not in self.converted}
        return dataclasses.replace(self, **types) if types else self

    @cached_property
    def digest(self) -> int:
        """Stable unsigned 64-bit hash of everything above, files by their contents and not by their paths."""
        contents = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {name: value.fingerprint if isinstance(value, Record) else value for name, value in contents.items()}
        return int(sha256_of_json(plain)[:16], 16)


def build_deployment(values: Mapping[str, Any]) -> Deployment:
    """Return the deployment that checked values describe.

    Parameters
    ----------
    values : mapping
        The keys of a point (``KEYS``) with values of the right type; ``model``, ``chip``, ``topology`` and, where
        given, ``runtime`` are objects. Absent keys take their defaults; load keys (``seq_len`` …) are ignored.

    Raises
    ------
    InfeasibleError
        The combination cannot be; the message names the numbers.
    TypeError
        A required key is absent or a key is not known (a caller's mistake, not a user's).
    """
    known = {key: KEYS[key].default for key in DEPLOYMENT_KEYS}
    if unknown := values.keys() - known.keys() - set(LOAD_KEYS):
        raise TypeError(f"unknown keys: {', '.join(sorted(unknown))}")
    if absent := [key for key in DEPLOYMENT_KEYS if KEYS[key].required and key not in values]:
        raise TypeError(f"absent keys: {', '.join(absent)}")
    chosen = {key: values.get(key, default) for key, default in known.items()}

    model: Model = chosen["model"]
    chosen["dp"] = _data_parallel(chosen)
    chosen |= _sharding(chosen)
    chosen["moe_tp"] = None
    if not model.has_experts:
        chosen["ep"] = None
    dispatch = chosen["moe_dispatch"] or default_dispatch(chosen["pcp"])
    chosen["moe_dispatch"] = dispatch if model.has_experts else None
    prefill_form = chosen["prefill_form"] or default_prefill_form(chosen)
    decode_form = chosen["decode_form"] or default_decode_form(chosen, DECODE_FORM)
    chosen["prefill_form"] = prefill_form if chosen["phase"] == "prefill" else None
    chosen["decode_form"] = decode_form if chosen["phase"] == "decode" else None
    chosen |= _element_types(chosen)
    chosen["runtime"] = chosen["runtime"] or load_runtime(chosen["topology"].runtime or chosen["chip"].runtime or IDEAL)
    for obstacle in _obstacles(chosen):
        raise InfeasibleError(obstacle)
    if model.has_experts:
        chosen["moe_tp"] = chosen["dp"] * chosen["pcp"] * chosen["tp"] // chosen["ep"]
    return Deployment(**chosen)


def _converted(chosen: Mapping[str, Any]) -> tuple[str, ...]:
    if all(kind.dtypes is None for kind in chosen["model"].kinds[0]):
        return ()
    networks = ("ffn", "experts") if chosen["ffn_dtype"] or chosen["dtype"] else ()
    return (("attention", *_PARTS) if chosen["dtype"] else ()) + networks


def _sharding(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what says how a shared cache is dealt out; nothing where it is not shared as deployed."""
    if chosen["pcp"] * chosen["dcp"] == 1:
        return {"cp_semantics": None, "interleave": None, "block_size": None}
    block_size = chosen["block_size"] or BLOCK_SIZE
    interleave = chosen["interleave"] or default_interleave(chosen, block_size)
    return {"interleave": interleave, "block_size": block_size}


def _element_types(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return every element type: what the grid says, else what the checkpoint is stored in."""
    model: Model = chosen["model"]
    stored, written = model.default_dtypes, chosen["ffn_dtype"] or chosen["dtype"]
    activation = chosen["activation_dtype"]
    return {
        "dtype": chosen["dtype"] or stored.attention,
        "ffn_dtype": written or stored.ffn,
        "expert_dtype": written or stored.experts,
        "converted": _converted(chosen),
        "o_proj_dtype": chosen["dtype"] or stored.o_proj,
        "kv_b_proj_dtype": chosen["dtype"] or stored.kv_b_proj,
        "indexer_dtype": chosen["dtype"] or stored.indexer,
        "kv_dtype": chosen["kv_dtype"] or stored.kv,
        # A type that the grid says is one that the weights were converted to, whatever the checkpoint has.
        "embedding_dtype": (None if chosen["dtype"] else stored.embedding) or activation,
        "head_dtype": (None if chosen["dtype"] else stored.head) or activation,
    }


def _widest_elements(hidden: int, kind: LayerKind) -> int:
    """Return a bound of the elements per token at the widest moment of a layer."""
    mixed = 0
    if (a := kind.softmax) is not None:
        mixed = a.n_heads * ((2 + a.output_gate) * a.d_qk + a.d_v)
        mixed += (a.indexer.n_heads + 1) * a.indexer.head_dim if a.indexer else 0
    elif (m := kind.linear) is not None:
        mixed = 2 * m.key_width + 2 * m.value_width + m.n_scalars * m.n_heads
    return max(mixed, 2 * kind.d_ff, kind.moe.top_k * hidden if kind.moe else 0)


def _output_width(a: Attention) -> int:
    """Return a bound of the elements per head of a partial output with its log-sum-exp."""
    return max(a.d_v, a.kv_lora_rank, a.d_qk) + 2


def _cache_elements(kind: LayerKind) -> int:
    """Return a bound of the two-byte elements that a token leaves in the cache of a layer."""
    if (a := kind.softmax) is None:
        return 0
    return a.kv_elements(1) + (a.scores.key_bytes if a.scores else 0)


def _data_parallel(chosen: Mapping[str, Any]) -> int:
    """Return dp, derived where it is ``"auto"``; refuse a product that is not the number of chips."""
    n_chips, dp, tp, pp, cp, pcp = (chosen[key] for key in ("n_chips", "dp", "tp", "pp", "cp", "pcp"))
    replica = tp * pp * cp * pcp
    names, degrees = ("*pcp", f"{tp}*{pp}*{cp}*{pcp}") if pcp > 1 else ("", f"{tp}*{pp}*{cp}")
    if dp == "auto":
        if n_chips % replica:
            raise InfeasibleError(
                f'dp = "auto" is not whole: n_chips = {n_chips} over tp*pp*cp{names} = {degrees} = {replica}'
            )
        return int(n_chips // replica)
    if dp * replica != n_chips:
        raise InfeasibleError(f"dp*tp*pp*cp{names} = {dp}*{degrees} = {dp * replica}, but n_chips = {n_chips}")
    return int(dp)


def _obstacles(chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield what forbids a combination, the most telling first."""
    model, topology = chosen["model"], chosen["topology"]
    n_chips, tp, pp, cp = (chosen[key] for key in ("n_chips", "tp", "pp", "cp"))
    if cp > 1 and chosen["path"] == "math":
        yield 'the analytic path has no context parallelism: use path = "g5" or cp = 1'
    if cp > 1 and chosen["tp_sp"]:
        yield f"tp_sp = true and cp = {cp} both split the sequence: use tp_sp = false or cp = 1"
    yield from context_obstacles(chosen)
    if chosen["collective"] == BEST and chosen["path"] == "math":
        yield 'collective = "best" is chosen by simulation: use path = "g5", or "ring" or "direct"'
    if topology.is_degraded and chosen["path"] == "math":
        yield f'the analytic path does not know degraded machines like {topology.name}: use path = "g5"'
    if (obstacle := topology.obstacle(n_chips)) is not None:
        yield obstacle
    if pp > model.n_layers:
        yield f"pp = {pp} stages for {model.n_layers} layers"
    yield from split_obstacles(chosen)
