"""Parts that every op is made of: matrix products, and element-wise work."""

from __future__ import annotations

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import element_bits, element_type, matrix_bytes, n_bytes
from g5cp_vec.cost.parts import GemmShape, Part
from g5cp_vec.mapping.load import Count, Load, ceil_div, wide

# Types that products run in although activations are wider.
_QUANTISED = ("fp8", "int8", "fp4")


def hidden_bytes(dep: Deployment, tokens: Count) -> Count:
    """Bytes of ``tokens`` hidden states."""
    return n_bytes(tokens * dep.model.hidden, dep.activation_dtype)


def sequence_tokens(dep: Deployment, load: Load) -> Count:
    """Tokens whose norm and residual a rank computes: a tp-th of them when the tp group splits the sequence."""
    return ceil_div(load.rank_tokens, dep.tp) if dep.tp_sp else load.rank_tokens


def memory(dep: Deployment, flop_class: str, n: Count) -> Part:
    """Element-wise work over ``n`` bytes."""
    return Part(flop_class, "memory", 0, n, dep.activation_dtype)


def touch(dep: Deployment, flop_class: str, elements: Count) -> Part:
    """Element-wise work that reads or writes so many activations."""
    return memory(dep, flop_class, n_bytes(elements, dep.activation_dtype))


def quantises(dep: Deployment, dtype: str) -> bool:
    """Whether inputs are brought to the narrower type of the weights they meet: where the chip multiplies in it.

    Integers of four bits are widened instead, and so is a type that the chip has no rate for.
    """
    element, known = element_type(dtype), dict(dep.chip.peak_flops)
    narrow = element_bits(element) < element_bits(dep.activation_dtype)
    return narrow and element in _QUANTISED and element in known


def gemm(
    dep: Deployment,
    flop_class: str,
    m: Count,
    k: int,
    n: int,
    dtype: str,
    weight_rows: Count = 1,
    *,
    shares_input: bool = False,
    width: int = 0,
) -> list[Part]:
    """One GEMM, or ``weight_rows`` of the same weight shape over ``m`` rows in all, and what brings its input to type.

    ``shares_input`` says that the product before has quantised the same input, ``width`` of which network it is part.
    """
    shape, flops, weights = (
        GemmShape(m, k, n, weight_rows, width),
        2 * wide(m) * k * n,
        weight_rows * matrix_bytes(k, n, dtype),
    )
    element = element_type(dtype)
    if not quantises(dep, dtype):
        moved = n_bytes(m * (k + n), dep.activation_dtype) + weights
        return [Part(flop_class, "gemm", flops, moved, element, shape)]
    narrow, wide_bytes = n_bytes(m * k, element), n_bytes(m * k, dep.activation_dtype)
    moved = narrow + n_bytes(m * n, dep.activation_dtype) + weights
    product = Part(flop_class, "gemm", flops, moved, element, shape)
    return [product] if shares_input else [memory(dep, flop_class, wide_bytes + narrow), product]
