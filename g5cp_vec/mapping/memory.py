"""Bytes a rank holds: weights, cache, activations and buffers of the fullest pipeline stage.

An engine that says how many tokens a step may have (``max_num_batched_tokens``) reserves activations and buffers for
all of them, whatever the load: activations in both phases, buffers of gathering in prefill.

All counts are exact integers (``semantics``: KV = batch * ceil(S / cp) * c_kv * layers of the stage; activations =
tokens of the rank times the widest moment of a layer; buffers = the ring blocks that can be in flight). A window of w
tokens keeps at most w of S, a chunk c of them, linear attention a state; an indexer its keys. The embedding table is
whole on every rank of the first stage, the head is split over tp. With pcp or dcp a rank keeps whole blocks of its
shard, and buffers are those of gathering (`g5cp_vec.mapping.sharded_memory`).

Not modelled: allocator fragmentation, workspaces of kernels and collective libraries (the chip's usable fraction
stands for them), scales of a quantised cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.attention import Attention
from g5cp_vec.config.context import ALL_GATHER
from g5cp_vec.config.context_kinds import shares_indexer_keys
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import matrix_bytes, n_bytes
from g5cp_vec.config.layers import LayerKind
from g5cp_vec.config.weights import Shards, Weight, layer_weights
from g5cp_vec.mapping.kv_layout import allocated_tokens_per_shard
from g5cp_vec.mapping.load import Count, Load, build_load, ceil_div, least, most, reserved_load
from g5cp_vec.mapping.sharded_memory import handed_over_bytes, sharded_buffer_bytes
from g5cp_vec.mapping.sharding import is_sharded_form
from g5cp_vec.mapping.spans import LOCAL_SPANS, kept_tokens
from g5cp_vec.mapping.structure import stage_layers

# No context is longer than this; a deployment that holds nothing per token has no other limit.
LONGEST_CONTEXT = 2**40
# No batch is larger than this.
MOST_SEQUENCES = 2**20
# Memory of a chip for which lengths that are far too long are still counted in 64 bits.
MOST_BYTES = 2**48
# Where a length is looked for without a better guess.
FIRST_STRIDE = 1024
_EVENLY = np.arange(1, 17)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest stage's ranks; integers or int64 arrays of shape (n_points,)."""

    weight_bytes: Count
    kv_bytes: Count
    activation_bytes: Count
    buffer_bytes: Count

    @property
    def peak_bytes(self) -> Count:
        """Everything at once."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.buffer_bytes


class MemoryModel:
    """Memory of one deployment as a function of its load.

    Parameters
    ----------
    dep : Deployment
    """

    def __init__(self, dep: Deployment) -> None:
        self.dep = dep
        self.usable_bytes = int(dep.chip.hbm_bytes * dep.chip.usable_memory_fraction)
        self._stages = _distinct_stages(dep)

    def at(self, seq_len: Count, batch: Count, cached_tokens: Count, held: Count | None = None) -> Memory:
        """Return the memory of a rank of the fullest stage for a context of ``seq_len`` tokens.

        ``batch`` sequences are computed; the cache holds ``held``, as many if not said.
        """
        stages = [_stage_memory(self.dep, stage, seq_len, batch, cached_tokens, held) for stage in self._stages]
        fullest = stages[0]
        for stage in stages[1:]:
            fuller = stage.peak_bytes > fullest.peak_bytes
            fullest = Memory(*(_choose(fuller, getattr(stage, f), getattr(fullest, f)) for f in Memory.__slots__))
        return fullest

    def max_seq_len(self, batch: Count, cached_tokens: Count, chunk_tokens: Count = 0) -> Count:
        """Return the longest context that still fits, 0 where none does; for integers or arrays alike."""
        chunk = chunk_tokens if self.dep.phase == "prefill" else 0
        # More bytes than these may leave 64 bits before a length is found too long; Python's integers take any.
        integers = np.int64 if self.usable_bytes <= MOST_BYTES else object
        load = np.broadcast_arrays(*(np.atleast_1d(np.asarray(n, integers)) for n in (batch, cached_tokens, chunk)))
        longest = np.minimum.reduce([self._longest(stage, *load) for stage in self._stages]).astype(np.int64)
        return longest if isinstance(batch, np.ndarray) else int(longest[0])

    def max_sequences(
        self, seq_len: NDArray[np.int64], cached_tokens: NDArray[np.int64], batch: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Return how many sequences of a length fit on a replica at once, 0 when not even one does; arrays alike.

        A pass computes all of them, or no more than ``batch``.
        """
        # Beyond this byte counts would leave 64 bits.
        most_counted = np.minimum(self.dep.most_tokens // (self.dep.dp * seq_len), MOST_SEQUENCES)

        def spare(n: NDArray[Any]) -> NDArray[Any]:
            length, cached = (_alongside(values, n) for values in (seq_len, cached_tokens))
            held = np.maximum(n, 1)
            computed = held if batch is None else np.minimum(_alongside(batch, n), held)
            return np.asarray(self.usable_bytes - self.at(length, computed, cached, held).peak_bytes)

        # Memory grows about evenly with sequences: this many, or one more or less.
        ends = spare(np.stack([1 + 0 * most_counted, most_counted], axis=-1))
        growth = np.maximum(ends[:, 0] - ends[:, 1], 1)
        guess = np.clip(ends[:, 0] * (most_counted - 1) / growth, -1, most_counted).astype(np.int64)
        return _last_fitting(spare, 0 * most_counted, most_counted + 1, guess[:, None] + np.arange(4))

    def _longest(
        self, stage: _Stage, batch: NDArray[Any], cached_tokens: NDArray[Any], chunk_tokens: NDArray[Any]
    ) -> NDArray[Any]:
        in_chunks, of_step = bool(np.any(chunk_tokens > 0)), self.dep.step_tokens
        # One chunk where there are none.
        whole = np.where(chunk_tokens > 0, chunk_tokens, 2 * LONGEST_CONTEXT)

        def spare(seq_len: NDArray[Any]) -> NDArray[Any]:
            n, cached, chunk = (_alongside(values, seq_len) for values in (batch, cached_tokens, whole))
            if not in_chunks:
                return np.asarray(self.usable_bytes - _stage_memory(self.dep, stage, seq_len, n, cached).peak_bytes)
            # The last two passes: the cache grows, but the last chunk may be a small one.
            begin = seq_len - ((seq_len - cached - 1) % chunk + 1)
            is_first = begin <= cached
            before = np.where(is_first, seq_len, begin), np.where(is_first, begin, begin - chunk)
            # An engine's step computes as many sequences as have room in it.
            room = n if of_step is None else np.maximum(np.minimum(n, of_step // chunk), 1)
            computed = np.where(chunk <= LONGEST_CONTEXT, room, n)
            passes = (seq_len, computed, begin, n), (before[0], computed, before[1], n)
            return np.asarray(
                self.usable_bytes - most(*(_stage_memory(self.dep, stage, *one).peak_bytes for one in passes))
            )

        shortest = cached_tokens + 1 if self.dep.phase == "prefill" else 1 + 0 * batch
        if stage.bends or in_chunks:
            guess, at_least = shortest[..., None] + FIRST_STRIDE * _EVENLY, spare(shortest)
        else:
            # Memory is linear in whole steps of the head-tail split.
            step = 4 * self.dep.sequence_ranks
            at_least, one_more = np.moveaxis(spare(shortest[..., None] + [0, step]), -1, 0)
            slope = at_least - one_more
            steps = np.where(slope > 0, at_least // np.maximum(slope, 1), LONGEST_CONTEXT // step)
            guess = (shortest + steps * step)[..., None] + np.arange(step + 1)
        # Memory never falls with length.
        longest = _last_fitting(spare, shortest, LONGEST_CONTEXT + 1 + 0 * shortest, guess)
        return np.where(at_least >= 0, longest, 0)


def _alongside(values: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """Return an array with as many axes as another that has some more at the end."""
    return values[(..., *[None] * (np.ndim(others) - np.ndim(values)))]


def _last_fitting(
    spare: Callable[[NDArray[Any]], NDArray[Any]], low: NDArray[Any], high: NDArray[Any], guesses: NDArray[Any]
) -> NDArray[Any]:
    """Return the last number below ``high`` that leaves something to spare, entry by entry.

    Parameters
    ----------
    spare : callable
        Never rises. Of arrays with one axis more than ``low``, at the end.
    low, high : ndarrays of integers
        ``low`` fits, or nothing does; it is returned then.
    guesses : ndarray of integers
        Where to look first, rising along the last axis. Next come numbers that are ever farther away as long as
        everything fits, so that none is far too large; then as many between what fits and what does not.
    """
    limit, stride = high, FIRST_STRIDE
    while True:
        tried = np.clip(guesses, low[..., None], high[..., None] - 1)
        n_fitting = (spare(tried) >= 0).sum(axis=-1)[..., None]
        ends = np.concatenate([low[..., None], tried, high[..., None]], axis=-1)
        low, high = (np.take_along_axis(ends, n_fitting + i, axis=-1)[..., 0] for i in (0, 1))
        if not np.any(high - low > 1):
            return low
        between = low[..., None] + (high - low)[..., None] * _EVENLY // 17
        farther = low[..., None] + stride * _EVENLY
        guesses = np.where((high == limit)[..., None], farther, between)
        stride = min(16 * stride, LONGEST_CONTEXT)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a pipeline stage holds, as far as memory is concerned.

    ``kinds`` that differ in what mixes tokens or in experts, with their number of layers, ``width`` elements per token
    at the widest moment; ``bends`` where a cache stops growing somewhere, or grows by blocks.
    """

    weight_bytes: int
    kinds: tuple[tuple[LayerKind, int], ...]
    width: int
    bends: bool


def _choose(mask: Any, if_true: Count, if_false: Count) -> Count:
    if isinstance(mask, np.ndarray):
        return np.where(mask, if_true, if_false)
    return if_true if mask else if_false


def _distinct_stages(dep: Deployment) -> list[_Stage]:
    """Return the stages of a deployment, equal ones once."""
    kinds, sequence = dep.model.kinds
    weights = [layer_weight_bytes(dep, kind) for kind in kinds]
    widths = [_widest(dep, kind) for kind in kinds]
    bends = dep.is_sharded or is_sharded_form(dep) or dep.moe_dispatch == ALL_GATHER
    stages = []
    for number, layers in enumerate(stage_layers(dep.model.n_layers, dep.pp)):
        counts = Counter(sequence[layer] for layer in layers)
        edges = _edge_weight_bytes(dep, first=number == 0, last=number == dep.pp - 1)
        stages.append(
            _Stage(
                weight_bytes=edges + sum(n * weights[kind] for kind, n in counts.items()),
                kinds=_merged([(kinds[kind], counts[kind]) for kind in sorted(counts)]),
                width=2 * dep.model.hidden + max(widths[kind] for kind in counts),
                bends=bends or any(_is_limited(kinds[kind]) for kind in counts),
            )
        )
    return list(dict.fromkeys(stages))


def _merged(layers: list[tuple[LayerKind, int]]) -> tuple[tuple[LayerKind, int], ...]:
    """Return one layer kind for each way to mix tokens and set of experts, with the layers of all that have both."""
    n_layers: Counter[Hashable] = Counter()
    first: dict[Hashable, LayerKind] = {}
    for kind, n in layers:
        n_layers[kind.attention, kind.moe] += n
        first.setdefault((kind.attention, kind.moe), kind)
    return tuple((kind, n_layers[alike]) for alike, kind in first.items())


def _is_limited(kind: LayerKind) -> bool:
    """Whether what a layer holds of a context stops growing."""
    return kind.linear is not None or kind.softmax is not None and kind.softmax.span in LOCAL_SPANS


def layer_weight_bytes(dep: Deployment, kind: LayerKind) -> int:
    """Weight bytes of one layer on one rank; vectors, routers and convolutions are kept in the activation type."""
    shards = Shards(dep.tp, dep.ep or 1, dep.moe_tp or 1)
    own = dep.of_layer(kind)
    return sum(_stored_bytes(own, weight) for weight in layer_weights(dep.model.hidden, kind, shards))


def _stored_bytes(dep: Deployment, weight: Weight) -> int:
    dtype = {
        "attention": dep.dtype,
        "o_proj": dep.o_proj_dtype,
        "kv_b_proj": dep.kv_b_proj_dtype,
        "indexer": dep.indexer_dtype,
        "ffn": dep.ffn_dtype,
        "experts": dep.expert_dtype,
        "activation": dep.activation_dtype,
    }[weight.stored]
    return weight.n * matrix_bytes(weight.inputs, weight.outputs, dtype)


def _edge_weight_bytes(dep: Deployment, *, first: bool, last: bool) -> int:
    """Embedding table on the first stage; final norm and the rank's part of the head on the last."""
    model = dep.model
    total = matrix_bytes(model.vocab, model.hidden, dep.embedding_dtype) if first else 0
    if last:
        vectors = model.hidden * (1 + model.norm_bias) + ceil_div(model.vocab, dep.tp) * model.head_bias
        total += int(n_bytes(vectors, dep.activation_dtype))
        if not (first and model.tie_embeddings):
            total += matrix_bytes(model.hidden, ceil_div(model.vocab, dep.tp), dep.head_dtype)
    return total


def _stage_memory(
    dep: Deployment, stage: _Stage, seq_len: Count, batch: Count, cached_tokens: Count, held: Count | None = None
) -> Memory:
    kv = sum(n * _cache_bytes(dep, kind, seq_len, batch if held is None else held) for kind, n in stage.kinds)
    nothing = 0 * (batch * seq_len)  # gives every field the shape of the load
    load = build_load(dep, seq_len, batch, cached_tokens)
    reserved = reserved_load(dep, load)
    tokens, buffers = reserved.rank_tokens, nothing
    if dep.phase == "prefill":
        if not dep.is_sharded and dep.step_tokens is None:
            tokens = batch * ceil_div(seq_len - cached_tokens, dep.sequence_ranks)
        for kind, _ in stage.kinds if dep.sequence_ranks * dep.dcp > 1 else ():
            buffers = most(buffers, _buffer_bytes(dep, kind, reserved))
    elif dep.is_sharded:
        for kind, _ in stage.kinds:
            buffers = most(buffers, sharded_buffer_bytes(dep, kind, load))
    for kind, _ in stage.kinds:
        buffers = most(buffers, _dispatched_bytes(dep, kind, tokens))
    activations = n_bytes(tokens * stage.width, dep.activation_dtype)
    return Memory(stage.weight_bytes + nothing, kv + nothing, activations + nothing, buffers)


def _cache_bytes(dep: Deployment, kind: LayerKind, seq_len: Count, batch: Count) -> Count:
    """Bytes that one layer keeps of its sequences on a rank: what its queries can still see, or a state."""
    # Of linear attention and of indexers a rank has only what its own queries need.
    owned = batch if dep.phase == "prefill" or dep.has_owner else ceil_div(batch, dep.cp)
    if kind.linear is not None:
        m = kind.linear
        taps = n_bytes(owned * (m.conv_width // dep.tp * max(m.conv_kernel - 1, 0)), dep.activation_dtype)
        return taps + n_bytes(owned * (m.state_elements // dep.tp), m.state_dtype)
    a = kind.softmax
    if a is None:
        return 0
    kept = ceil_div(kept_tokens(a, seq_len), dep.cp)
    if dep.is_sharded:
        assert dep.block_size is not None
        kept = allocated_tokens_per_shard(kept, dep.kv_shards, dep.block_size)
    held = n_bytes(batch * kept * a.kv_elements(dep.tp), dep.kv_dtype)
    if a.scores is None:
        return held
    # In decode the owner of the tokens scores, and so keeps every key; as every rank does with a replicated indexer.
    n_keys = seq_len if dep.phase == "decode" else ceil_div(seq_len, dep.cp)
    if dep.cp_semantics is not None and shares_indexer_keys(dep.cp_semantics, dep.pcp, dep.dcp):
        n_keys = kept
    return held + owned * n_keys * a.scores.key_bytes


def _buffer_bytes(dep: Deployment, kind: LayerKind, load: Load) -> Count:
    """Bytes of other ranks' keys and values that can be under way to a rank, or held by it, at once."""
    if (m := kind.linear) is not None and dep.pcp > 1:
        return handed_over_bytes(dep, m, load)
    if (m := kind.linear) is not None:  # the states and transitions of all other ranks' chunks
        n = 2 * (dep.cp - 1) * ((m.state_elements + m.transition_elements) // dep.tp)
        return n_bytes(load.batch * n, m.state_dtype)
    a = kind.softmax
    if a is None:
        return 0
    if is_sharded_form(dep):
        return sharded_buffer_bytes(dep, kind, load)
    block = load.batch * (load.cached // dep.sequence_ranks) + load.rank_tokens
    if a.span in LOCAL_SPANS:
        # What two chunks can reach at most, wherever the limits of chunks fall.
        limit = a.window or a.chunk
        assert limit is not None
        tokens = least(2 * load.batch * (limit - 1), (dep.cp - 1) * block)
        return n_bytes(tokens * a.kv_elements(dep.tp), dep.kv_dtype)
    in_flight = (dep.sequence_ranks - 1) * n_bytes(block * a.kv_elements(dep.tp), dep.kv_dtype)
    return in_flight + ((dep.cp - 1) * block * a.scores.key_bytes if a.scores is not None else 0)


def _dispatched_bytes(dep: Deployment, kind: LayerKind, tokens: Count) -> Count:
    """Return the bytes of all replicas' hidden states and logits, gathered for experts, and of the sums of outputs."""
    if kind.moe is None or dep.moe_dispatch != ALL_GATHER or dep.replicas == 1:
        return 0 * tokens
    per_token = 2 * dep.model.hidden + kind.moe.n_experts
    return n_bytes(dep.replicas * tokens * per_token, dep.activation_dtype)


def _widest(dep: Deployment, kind: LayerKind) -> int:
    """Elements per token at the widest moment of a layer, beside the residual stream and its copy."""
    tp, mixed = dep.tp, 0
    if kind.softmax is not None:
        mixed = _attention_width(dep, kind.softmax)
    elif kind.linear is not None:
        m = kind.linear
        mixed = (2 * m.key_width + 2 * m.value_width + m.n_scalars * m.n_heads) // tp
    if kind.moe is not None:
        return max(mixed, kind.moe.top_k * dep.model.hidden)
    return max(mixed, kind.n_inner * kind.d_ff // tp)


def _attention_width(dep: Deployment, a: Attention) -> int:
    """Elements per token of queries, keys and values of a shard, a gate and an indexer's queries and key with them."""
    heads = a.n_heads // dep.tp
    kv_heads = a.kv_heads(dep.tp) if a.kind == "gqa" else heads
    width = heads * a.d_qk * (1 + a.output_gate) + kv_heads * (a.d_qk + a.d_v)
    if a.span == "sparse":  # latents are attended as they are
        width = heads * (a.kv_lora_rank + a.qk_rope_head_dim) + a.kv_elements(dep.tp)
    return width + ((a.scores.n_heads + 1) * a.scores.head_dim if a.scores is not None else 0)
