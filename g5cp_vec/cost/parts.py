"""What one kernel does: its exact work, and the shape that a calibrated duration is looked up by."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from g5cp_vec.mapping.load import Count


@dataclass(frozen=True, slots=True)
class GemmShape:
    """``n_weights`` matrices of shape (k, n), ``m`` rows over all of them together.

    ``width`` is that of the network whose up or down projection this is, 0 for other products.
    """

    m: Count
    k: int
    n: int
    n_weights: Count = 1
    width: int = 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of ``q_tokens`` rows per sequence over ``kv_tokens``, of which ``pairs`` are not masked.

    Attributes
    ----------
    phase : {"prefill", "decode"}
    batch, q_tokens, kv_tokens : int or ndarray
    pairs : int or ndarray
        Unmasked (query, key) pairs of one head of one sequence; float64 for arrays (they may leave int64).
    heads, kv_heads : int
        Of the tensor-parallel shard.
    d_qk, d_v : int
        Elements per head of a query (or key) and of a value.
    latent : bool
        Whether keys and values are one latent per token that all heads share (absorbed MLA).
    kv_dtype : str
        Element type that keys and values are read in.
    chosen : bool
        Whether each query attends keys of its own choice, gathered from anywhere (sparse attention).
    """

    phase: str
    batch: Count
    q_tokens: Count
    kv_tokens: Count
    pairs: Count
    heads: int
    kv_heads: int
    d_qk: int
    d_v: int
    latent: bool
    kv_dtype: str
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel's work.

    Attributes
    ----------
    flop_class : str
        Class under which the audit balances FLOPs.
    unit : {"gemm", "attention", "memory"}
        Which efficiency applies.
    flops, bytes : int or ndarray
    dtype : str
        Element type whose peak rate applies.
    shape : GemmShape, AttentionShape or None
        None for element-wise work, whose duration its bytes decide.
    prices : dict
        What `g5cp_vec.cost.calibration.price_part` found before, by what it depends on beside the part.
    """

    flop_class: str
    unit: str
    flops: Count
    bytes: Count
    dtype: str
    shape: GemmShape | AttentionShape | None = None
    prices: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)


OpParts = dict[str, list[Part]]
