"""Parts that every op is made of: matrix products, and element-wise work."""

from __future__ import annotations

from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.dtypes import element_type, matrix_bytes, n_bytes
from g5cp_vec.cost.parts import GemmShape, Part
from g5cp_vec.mapping.load import Count, Load, ceil_div, wide


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


def gemm(dep: Deployment, flop_class: str, m: Count, k: int, n: int, dtype: str, weight_rows: Count = 1) -> Part:
    """One GEMM, or ``weight_rows`` of the same weight shape over ``m`` rows in all."""
    activations = n_bytes(m * (k + n), dep.activation_dtype)
    n_bytes_ = activations + weight_rows * matrix_bytes(k, n, dtype)
    shape = GemmShape(m, k, n, weight_rows)
    return Part(flop_class, "gemm", 2 * wide(m) * k * n, n_bytes_, element_type(dtype), shape)
