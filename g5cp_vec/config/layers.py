"""One layer: what mixes tokens, and its feed-forward network."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from g5cp_vec.config._record import Count, Frozen, Size
from g5cp_vec.config.attention import Attention, Linear
from g5cp_vec.config.dtypes import WeightDtype


class Moe(Frozen):
    """A mixture-of-experts feed-forward network.

    Attributes
    ----------
    n_experts, top_k : int
        Routed experts, and how many of them a token visits.
    d_expert : int
        Inner width of one expert.
    n_shared : int
        Experts that every token visits.
    d_shared : int
        Inner width of one shared expert; 0 for that of a routed one.
    shared_gate : bool
        Whether the shared experts' output is multiplied by a scalar gate of their own.
    router_bias : bool
        Whether the router has one number per expert beside its matrix (a bias, or a correction of scores).
    """

    n_experts: Count
    top_k: Count
    d_expert: Count
    n_shared: Size = 0
    d_shared: Size = 0
    shared_gate: bool = False
    router_bias: bool = False

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k = {self.top_k} is more than n_experts = {self.n_experts}")
        if not self.n_shared and (self.d_shared or self.shared_gate):
            raise ValueError("d_shared and shared_gate need n_shared > 0")
        return self

    @property
    def shared_width(self) -> int:
        """Inner width of the shared experts together."""
        return self.n_shared * (self.d_shared or self.d_expert)


class LayerDtypes(Frozen):
    """Element types that one layer is stored in where they differ from the model's.

    Attributes
    ----------
    attention, ffn, experts, o_proj, kv_b_proj, indexer : str or None
        As in the model's ``[dtypes]``; the latter three are as `attention` where neither says them.
    """

    attention: WeightDtype | None = None
    ffn: WeightDtype | None = None
    experts: WeightDtype | None = None
    o_proj: WeightDtype | None = None
    kv_b_proj: WeightDtype | None = None
    indexer: WeightDtype | None = None


class LayerKind(Frozen):
    """One layer, and what distinguishes it from another.

    Attributes
    ----------
    attention : Attention, Linear or None
        What mixes tokens; None for nothing.
    ffn : {"dense", "moe", "none"}
    d_ff : int
        Inner width of a dense network; 0 otherwise.
    moe : Moe or None
    dtypes : LayerDtypes or None
        Element types that differ from the model's.
    gated, ffn_bias, norms, norm_bias
        As of the model; see :class:`g5cp_vec.config.model.Model`.
    """

    attention: Attention | Linear | None
    ffn: Literal["dense", "moe", "none"]
    d_ff: Size = 0
    moe: Moe | None = None
    dtypes: LayerDtypes | None = None
    gated: bool = True
    ffn_bias: bool = False
    norms: Literal["pre", "sandwich", "parallel"] = "pre"
    norm_bias: bool = False

    @property
    def softmax(self) -> Attention | None:
        """The attention, where it is one that grows a cache."""
        return self.attention if isinstance(self.attention, Attention) else None

    @property
    def linear(self) -> Linear | None:
        """The linear attention, where it is one."""
        return self.attention if isinstance(self.attention, Linear) else None

    @property
    def n_norms(self) -> int:
        """Norms of the hidden state."""
        if self.norms == "parallel":
            return 1
        return ((self.attention is not None) + (self.ffn != "none")) * (2 if self.norms == "sandwich" else 1)

    @property
    def n_inner(self) -> int:
        """Inner projections of a feed-forward network: gate and up, or up alone."""
        return 1 + self.gated
