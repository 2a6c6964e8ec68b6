"""Durations of kernels from measurements: a surface of times over the sizes of a kernel's shape.

Inside the nodes of a surface the logarithm of the duration is interpolated linearly in the logarithms of the sizes;
between two nodes it is therefore never below the smaller and never above the larger of them. Beyond the nodes the
duration at the nearest node is scaled as the closed form

    t(F, B) = overhead + ((F / (peak e_f))^3 + (B / (bandwidth e_m))^3)^(1/3)

scales between there and here, F and B being the work of the shape (``WORK``): efficiency settles at its value at the
edge of the table as the overhead's share vanishes. No duration is below F / peak or B / bandwidth. How far a shape lies
outside the table is its *extrapolation*, the largest ratio over its sizes, 1 inside.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config.calibration import CONSTANTS, Calibration, Kernels, Surface
from g5cp_vec.config.chip import Chip
from g5cp_vec.config.dtypes import element_bits
from g5cp_vec.cost.parts import AttentionShape, GemmShape, Part
from g5cp_vec.mapping.load import wide

Real = NDArray[np.float64]
# Coordinates on the axes of a surface, in their order; numbers or arrays of one shape.
Coordinates = Sequence[Any]
DEFAULTS = Kernels()
Surfaces = dict[tuple[str, str], Surface]
# So many are priced in one go: what is known of them on the way stays in a processor's cache.
SHAPES_AT_ONCE = 8192
# Exponent that blends arithmetic and memory time: 3 predicts held-out rows best among 2, 3 and 6.
SHARPNESS = 3.0
# Dimensions of DeepSeek-V3's attention, for whole modules: hidden, query rank, latent rank, widths per head.
_HIDDEN, _Q_RANK, _LATENT, _ROTARY, _NOPE, _VALUE = 7168, 1536, 512, 64, 128, 128
# Sparse attention attends this many tokens, chosen by an indexer of so many heads of so many elements.
_CHOSEN, _INDEX_HEADS, _INDEX_WIDTH = 2048, 64, 128


class Price(NamedTuple):
    """Seconds, and how far outside the measured sizes they are asked for (>= 1)."""

    seconds: Any
    extrapolated: Any


class Place(NamedTuple):
    """Where a part lies on a surface, how much work that is, and which share of the duration is its own.

    ``work`` is relative to the same place at the widths that were measured; ``is_of_type`` says whether the surface is
    of the part's element type.
    """

    surface: Surface
    coordinates: tuple[Any, ...]
    work: float
    share: Any
    ratios: tuple[float, ...]
    is_of_type: bool = True


def _gemm_work(c: dict[str, float], m: Any, n: Any, k: Any) -> tuple[Any, Any]:
    return 2.0 * m * n * k, (1.0 * n * k + 1.0 * m * k) * c["element_bits"] / 8 + 2.0 * m * n


def _prefill_work(c: dict[str, float], length: Any, heads: Any) -> tuple[Any, Any]:
    width = c["d_qk"] + c["d_v"]
    return 1.0 * heads * length * length * width, 2.0 * heads * length * width * (1 + c["kv_heads_per_head"])


def _mla_projections(length: Any, heads: Any) -> Any:
    weights = _HIDDEN * (_Q_RANK + _LATENT + _ROTARY) + heads * (
        _Q_RANK * (_NOPE + _ROTARY) + _LATENT * (_NOPE + _VALUE) + _VALUE * _HIDDEN
    )
    return 2.0 * length * weights


def _mla_module_work(c: dict[str, float], length: Any, heads: Any) -> tuple[Any, Any]:
    width = _NOPE + _ROTARY + _VALUE
    return 1.0 * heads * length * length * width + _mla_projections(length, heads), 4.0 * heads * length * width


def _decode_work(c: dict[str, float], length: Any, kv_heads: Any) -> tuple[Any, Any]:
    elements = 1.0 * length * kv_heads * (c["d_qk"] + c["d_v"])
    return 2 * c["heads_per_kv_head"] * elements, elements * c["element_bits"] / 8


def _mla_decode_work(c: dict[str, float], length: Any, batch: Any, heads: Any) -> tuple[Any, Any]:
    tokens = 1.0 * length * batch
    return 2 * heads * tokens * (c["d_qk"] + c["d_v"]), tokens * c["d_qk"] * c["element_bits"] / 8


def _moe_work(c: dict[str, float], rows_per_expert: Any, experts: Any, width: Any) -> tuple[Any, Any]:
    rows = 1.0 * rows_per_expert * experts
    weights = 3.0 * experts * c["hidden"] * width * c["element_bits"] / 8
    return 6 * rows * c["hidden"] * width, weights + 2 * rows * (2 * c["hidden"] + 3 * width)


def _dsa_module_work(c: dict[str, float], new_tokens: Any, context: Any) -> tuple[Any, Any]:
    attended = np.minimum(context, _CHOSEN)
    core = 2.0 * new_tokens * c["heads"] * attended * (2 * _LATENT + _ROTARY)
    indexer = c["has_indexer"] * 2.0 * new_tokens * context * _INDEX_HEADS * _INDEX_WIDTH
    keys = c["has_indexer"] * 1.0 * context * _INDEX_WIDTH
    return _mla_projections(new_tokens, c["heads"]) + core + indexer, _mla_projections(1, c["heads"]) / 2 + keys


def _collective_work(c: dict[str, float], message: Any, group: Any) -> tuple[Any, Any]:
    return 0.0 * message * group, c["copies"] * message * (group - 1.0) / group


# FLOPs and bytes of a shape on the axes of a surface: (constants by name, *coordinates) -> (flops, bytes).
WORK: dict[str, Callable[..., tuple[Any, Any]]] = {
    "gemm": _gemm_work,
    "attention_prefill": _prefill_work,
    "mla_prefill": _prefill_work,
    "mla_module": _mla_module_work,
    "attention_decode": _decode_work,
    "mla_decode": _mla_decode_work,
    "moe": _moe_work,
    "dsa_module": _dsa_module_work,
    "collective": _collective_work,
}


def closed_form(flop_s: Any, byte_s: Any, overhead_s: Any, arithmetic: Any, memory: Any) -> Any:
    """Return the duration from the times of arithmetic and of memory at peak, and the two efficiencies (s)."""
    blend = (flop_s / arithmetic) ** SHARPNESS + (byte_s / memory) ** SHARPNESS
    return overhead_s + blend ** (1 / SHARPNESS)


def peak_times(chip: Chip, surface: Surface, coordinates: Coordinates) -> tuple[Any, Any]:
    """Return the time of a shape's arithmetic and of its traffic at the chip's (or its links') peak (s)."""
    flops, n = WORK[surface.kind](surface.numbers, *coordinates)
    link = surface.numbers.get("link_gigabytes_per_second")
    bandwidth = chip.hbm_bandwidth_bytes_per_s if link is None else link * 1e9
    return flops / chip.peak(surface.arithmetic_dtype), n / bandwidth


def interpolate(surface: Surface, logs: Sequence[Real]) -> Real:
    """Return the duration (s) at base-2 logarithms of coordinates inside the nodes: multilinear in logarithms."""
    flat = np.zeros((1, *logs[0].shape), np.int64)
    weight = np.ones((1, *logs[0].shape))
    for nodes, x in zip(surface.log_nodes, logs, strict=True):
        flat = flat * len(nodes)
        if len(nodes) == 1:
            continue
        left = np.searchsorted(nodes[1:-1], x, side="right")
        part = (x - nodes[left]) / (nodes[left + 1] - nodes[left])
        flat = np.concatenate([flat + left, flat + left + 1])
        weight = np.concatenate([weight * (1 - part), weight * part])
    # Corner by corner: numpy would add up a single shape's in another order, so its last bit would tell company.
    total, *others = surface.log_duration[flat] * weight
    for corner in others:
        total = total + corner
    result: Real = np.exp(total)
    return result


def extrapolation(surface: Surface, coordinates: Coordinates) -> Any:
    """Return the largest ratio by which coordinates lie outside the nodes, 1 inside."""
    factor: Any = 1.0
    for (low, high), x in zip(surface.limits, coordinates, strict=True):
        factor = np.maximum(factor, np.maximum(low / x, x / high))
    return factor


def surface_seconds(chip: Chip, surface: Surface, coordinates: Coordinates, work: Any = 1.0) -> Real:
    """Return the duration of a shape (s), not below the chip's peaks.

    Parameters
    ----------
    chip : Chip
    surface : Surface
    coordinates : sequence of numbers or ndarrays
        On the axes of the surface, all > 0.
    work : float or ndarray
        Work relative to that of the measured widths. It scales the closed form like a size outside the nodes, so that a
        launch costs what it costs.
    """
    asked = np.broadcast_arrays(*(np.asarray(x, float) for x in coordinates))
    inside = [np.clip(x, low, high) for x, (low, high) in zip(asked, surface.limits, strict=True)]
    seconds = interpolate(surface, [np.log2(x) for x in inside])
    flop_s, byte_s = (work * s for s in peak_times(chip, surface, asked))
    if np.any(work != 1.0) or any(np.any(x != y) for x, y in zip(asked, inside, strict=True)):
        form = surface.overhead_s, surface.arithmetic_efficiency, surface.memory_efficiency
        here = closed_form(flop_s, byte_s, *form)
        edge = closed_form(*peak_times(chip, surface, inside), *form)
        seconds = seconds * (here / edge)
    result: Real = np.maximum(seconds, bound_seconds(surface, flop_s, byte_s, asked))
    return result


def bound_seconds(surface: Surface, flop_s: Any, byte_s: Any, coordinates: Coordinates) -> Any:
    """Return what no kernel can beat (s): arithmetic and traffic at peak.

    Of routed experts only those surely touched count (the rows of a balanced routing measurably read fewer than all);
    an all-reduce inside a switch sends every byte once.
    """
    if surface.kind == "moe":
        return flop_s
    if surface.kind == "collective":
        return byte_s / surface.numbers["copies"]
    return np.maximum(flop_s, byte_s)


def place_part(calibration: Calibration, hidden: int, part: Part, kernels: Kernels = DEFAULTS) -> Place | None:
    """Return the surface that prices a part and where on it; None where nothing was measured for it.

    Parameters
    ----------
    calibration : Calibration
    hidden : int
        Width of the model's hidden state; an expert network was measured at its own.
    part : Part
    kernels : Kernels

    Notes
    -----
    Prefill: kernels were measured on causal squares of `length` tokens. A block of q rows over any keys is taken as the
    square whose rows attend as many keys on average, length = 2 pairs / q, with as many rows in all,
    heads = batch * heads * q / length. FLOPs and rows agree exactly; a causal block of a ring is the square it is.

    Decode: batch and key/value heads are one axis, as they are independent streams; a shard's tokens are its length.

    Keys that each query chooses, scores of an indexer, latents in prefill and linear attention were not measured.

    One product per head (the absorbed halves of kv_b_proj) is taken as one product with all heads' columns: the same
    FLOPs and weights. Experts' products share the duration of the whole measured expert network by their FLOPs.
    """
    shape, surfaces = part.shape, calibration.chosen(kernels)
    if isinstance(shape, GemmShape):
        return _place_gemm(surfaces, hidden, part, shape)
    if isinstance(shape, AttentionShape) and part.flop_class == "attention":
        return _place_attention(surfaces, part, shape)
    return None


def _place_gemm(surfaces: Surfaces, hidden: int, part: Part, shape: GemmShape) -> Place | None:
    if part.flop_class == "experts":
        # Where the element type was not measured, that of the nearest width, a narrower one first.
        bits = element_bits(part.dtype)
        measured = [dtype for kind, dtype in surfaces if kind == "moe"]
        if not measured:
            return None
        dtype = min(measured, key=lambda one: (one != part.dtype, abs(element_bits(one) - bits), element_bits(one)))
        experts = surfaces["moe", dtype]
        coordinates = (wide(shape.m) / shape.n_weights, shape.n_weights, shape.width)
        whole, _ = _moe_work(experts.numbers, *coordinates)
        work = hidden / experts.numbers["hidden"]
        ratios = (_ratio(hidden, experts.numbers["hidden"]),)
        return Place(experts, coordinates, work, part.flops / (whole * work), ratios, dtype == part.dtype)
    surface = surfaces.get(("gemm", part.dtype))
    if surface is None:
        return None
    return Place(surface, (wide(shape.m) / shape.n_weights, shape.n * shape.n_weights, shape.k), 1.0, 1.0, ())


def _place_attention(surfaces: Surfaces, part: Part, shape: AttentionShape) -> Place | None:
    if shape.chosen or (shape.latent and shape.phase == "prefill"):
        return None
    if shape.phase == "prefill":
        kind = "attention_prefill" if shape.d_qk == shape.d_v else "mla_prefill"
        surface = surfaces.get((kind, part.dtype))
        # Without a pair there is nothing to do; see price_part.
        length = np.maximum(2 * shape.pairs / shape.q_tokens, 1.0)
        coordinates: tuple[Any, ...] = (length, wide(shape.batch) * shape.heads * shape.q_tokens / length)
    elif shape.latent:
        surface = surfaces.get(("mla_decode", shape.kv_dtype))
        coordinates = (shape.kv_tokens, shape.batch, shape.heads)
    else:
        surface = surfaces.get(("attention_decode", shape.kv_dtype))
        coordinates = (shape.kv_tokens, wide(shape.batch) * shape.kv_heads)
    if surface is None:
        return None
    c = surface.numbers
    ratios = (_ratio(shape.d_qk, c["d_qk"]), _ratio(shape.d_v, c["d_v"]))
    work = (shape.d_qk + shape.d_v) / (c["d_qk"] + c["d_v"])
    return Place(surface, coordinates, work, 1.0, ratios)


def _ratio(asked: float, measured: float) -> float:
    return max(asked / measured, measured / asked) if asked else 1.0


def price_part(chip: Chip, hidden: int, part: Part, kernels: Kernels = DEFAULTS) -> Price | None:
    """Return the calibrated duration of one part; None where the chip's calibration has nothing for it.

    Element-wise work takes its bytes at the share of the bandwidth that memory-bound products were measured to reach.
    A part remembers its prices: durations, fixed costs and what is measured all ask for them.
    """
    if chip.calibration is None:
        return None
    # With the chip, so that its id stays its own.
    asked = id(chip), hidden, kernels
    if asked not in part.prices:
        price_parts(chip, hidden, [part], kernels)
    price: Price | None = part.prices[asked][1]
    return price


def price_parts(chip: Chip, hidden: int, parts: Iterable[Part], kernels: Kernels = DEFAULTS) -> None:
    """Let parts know their prices (see `price_part`): those that lie on one surface together, so at its cost once."""
    calibration, asked = chip.calibration, (id(chip), hidden, kernels)
    if calibration is None:
        return
    placed: dict[int, list[tuple[Part, Place, Any]]] = defaultdict(list)
    for part in parts:
        place = None if part.unit == "memory" else place_part(calibration, hidden, part, kernels)
        if place is not None and place.is_of_type:
            placed[id(place.surface)].append((part, place, _row_seconds(chip, calibration, part, kernels)))
        elif part.unit == "memory" and calibration.memory_efficiency is not None:
            byte_s = part.bytes / chip.hbm_bandwidth_bytes_per_s
            part.prices[asked] = chip, Price(byte_s / calibration.memory_efficiency, 1.0)
        else:
            part.prices[asked] = chip, None
    for alike in placed.values():
        for (part, *_), price in zip(alike, _price_alike(chip, alike), strict=True):
            part.prices[asked] = chip, price


def _price_alike(chip: Chip, alike: list[tuple[Part, Place, Any]]) -> list[Price]:
    """Price parts that lie on one surface, of any number of points each, with the least seconds each takes."""
    surface = alike[0][1].surface
    shapes = [np.broadcast(part.flops, part.bytes).shape for part, *_ in alike]
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    places = [slice(begin, end) for begin, end in pairwise([0, *ends])]
    table = np.empty((len(surface.axes) + 6, ends[-1]))
    for (part, place, least_s), at in zip(alike, places, strict=True):
        row = (*place.coordinates, part.flops, part.bytes, place.share, place.work, max((1.0, *place.ratios)), least_s)
        for column, value in zip(table, row, strict=True):
            column[at] = value
    seconds, factor = np.empty(ends[-1]), np.empty(ends[-1])
    for begin in range(0, ends[-1], SHAPES_AT_ONCE):
        some = slice(begin, begin + SHAPES_AT_ONCE)
        seconds[some], factor[some] = _price_shapes(chip, surface, *table[:, some])
    return [Price(seconds[at].reshape(n)[()], factor[at].reshape(n)[()]) for at, n in zip(places, shapes, strict=True)]


def _price_shapes(chip: Chip, surface: Surface, *columns: Real) -> tuple[Real, Real]:
    """Return seconds and extrapolation; the columns are those that `_price_alike` fills."""
    *coordinates, flops, n_bytes, share, work, ratio, least_s = columns
    seconds = np.maximum(surface_seconds(chip, surface, coordinates, work) * share, least_s)
    bound_s = np.maximum(flops / chip.peak(surface.arithmetic_dtype), n_bytes / chip.hbm_bandwidth_bytes_per_s)
    factor = np.maximum(extrapolation(surface, coordinates), ratio)
    # A rank that nothing is left for (a window that needs no other rank's keys) launches nothing.
    return np.where(flops == 0, bound_s, np.maximum(seconds, bound_s)), factor


def _row_seconds(chip: Chip, calibration: Calibration, part: Part, kernels: Kernels) -> Any:
    """Return what one row of a prefill over more keys than it has rows takes alone, as the decode step it is (s).

    Some row attends at least as many keys as the average one, and a kernel that does several rows could do that one
    only: so none is faster than the kernel for one row. It matters for few new tokens over a long cache, which no
    table of prefill kernels has. 0 where that is another kernel: with latents, and in a type not measured in decode.
    """
    shape = part.shape
    if not isinstance(shape, AttentionShape) or shape.phase != "prefill" or shape.d_qk != shape.d_v:
        return 0.0
    is_over_cache = np.asarray(shape.kv_tokens > shape.q_tokens)
    if not is_over_cache.any():
        return 0.0
    surface = calibration.chosen(kernels).get(("attention_decode", shape.kv_dtype))
    if surface is None or part.flop_class != "attention":
        return 0.0
    # Pairs count a row's own key by half.
    keys = np.maximum(np.floor(shape.pairs / shape.q_tokens + 0.5), 1.0)
    c = surface.numbers
    work = (shape.d_qk + shape.d_v) / (c["d_qk"] + c["d_v"])
    seconds = surface_seconds(chip, surface, (keys, wide(shape.batch) * shape.kv_heads), work)
    return np.where(is_over_cache, seconds, 0.0)


def kindred_seconds(chip: Chip, hidden: int, part: Part, kernels: Kernels = DEFAULTS) -> Any:
    """Return the duration of experts of an element type that was not measured, by one that was; None without any.

    From the measured type to the asked one, its bytes and its peak, the duration goes as the closed form does.
    """
    place = None if chip.calibration is None else place_part(chip.calibration, hidden, part, kernels)
    if place is None:
        return None
    surface, work = place.surface, place.work
    form = surface.overhead_s, surface.arithmetic_efficiency, surface.memory_efficiency
    flop_s, byte_s = (work * s for s in peak_times(chip, surface, place.coordinates))
    asked = {**surface.numbers, "element_bits": float(element_bits(part.dtype))}
    flops, n_bytes = (work * n for n in WORK[surface.kind](asked, *place.coordinates))
    here = closed_form(flops / chip.peak(part.dtype), n_bytes / chip.hbm_bandwidth_bytes_per_s, *form)
    seconds = surface_seconds(chip, surface, place.coordinates, work) * (here / closed_form(flop_s, byte_s, *form))
    bound_s = np.maximum(part.flops / chip.peak(part.dtype), part.bytes / chip.hbm_bandwidth_bytes_per_s)
    return np.where(part.flops == 0, bound_s, np.maximum(seconds * place.share, bound_s))


def constants_of(kind: str, **values: float) -> tuple[tuple[str, float], ...]:
    """Return a kind's constants in their order."""
    return tuple((name, float(values[name])) for name in CONSTANTS[kind])
