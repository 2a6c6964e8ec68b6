"""What mixes the tokens of a layer: attention of every kind, and the linear forms that keep a state in its place.

Softmax attention is grouped-query (``gqa``, which covers multi-head) or multi-head latent (``mla``). By itself it is
full; a ``window`` lets a token see the last so many tokens, a ``chunk`` those of its own chunk, an ``indexer`` the
``top_k`` that a small attention beside it scores highest. Linear attention keeps a state of constant size.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from g5cp_vec.config._record import Count, Frozen, Size
from g5cp_vec.config.dtypes import Dtype, n_bytes

_MLA_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Indexer(Frozen):
    """The scorer of sparse attention (DeepSeek-V3.2: ``wq_b``, ``wk``, ``k_norm``, ``weights_proj``).

    Attributes
    ----------
    n_heads, head_dim : int
        Of its queries; one key of `head_dim` elements per token serves them all.
    top_k : int
        Tokens that attention sees.
    shared : bool
        Whether the layer takes the choice of the nearest layer before it that has an indexer: no weights, no keys.
    dtype : str
        Element type that scores are computed in and keys are cached in; 8-bit keys have an fp32 scale for every 128
        elements.
    """

    n_heads: Count
    head_dim: Count
    top_k: Count
    shared: bool = False
    dtype: Dtype = "fp8"

    @property
    def key_bytes(self) -> int:
        """Bytes of one cached key."""
        scales = -(-self.head_dim // 128) if self.dtype in ("fp8", "int8") else 0
        return int(n_bytes(self.head_dim, self.dtype)) + 4 * scales


class Attention(Frozen):
    """One layer's softmax attention.

    Attributes
    ----------
    kind : {"gqa", "mla"}
    n_heads, n_kv_heads : int
        Query heads, key/value heads; with ``mla`` every head has keys of its own once the latent is up-projected, so
        `n_kv_heads` defaults to `n_heads`.
    head_dim : int
        Elements per head (``gqa``; 0 with ``mla``).
    q_lora_rank : int or None
        Rank of the query compression; None where queries are projected directly.
    kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim : int
        Latent width and per-head widths (``mla``; 0 with ``gqa``).
    rope_dim : int or None
        Elements per head that are rotated (``gqa``); None for all of them, 0 for none.
    window : int or None
        Tokens that a token sees, itself included.
    chunk : int or None
        Length of the chunks that positions are cut into; a token sees those of its own chunk up to itself.
    qkv_bias, o_bias : bool
        Whether the projections from and to the hidden state have biases (``mla``: those down to the latents; a
        direct query projection has none).
    qk_norm : {"none", "unweighted", "head", "width"}
        Norm of queries and keys (``gqa``): without weights, with weights of one head, or of all heads together. The
        norms of latents are always there.
    sinks : bool
        Whether each head has a learned logit beside its keys.
    output_gate : bool
        Whether the output is multiplied by a gate as wide as the queries, projected with them (``gqa``).
    indexer : Indexer or None
        Of sparse attention (``mla``).
    """

    kind: Literal["gqa", "mla"]
    n_heads: Count
    n_kv_heads: Count
    head_dim: Size = 0
    q_lora_rank: Count | None = None
    kv_lora_rank: Size = 0
    qk_nope_head_dim: Size = 0
    qk_rope_head_dim: Size = 0
    v_head_dim: Size = 0
    rope_dim: Size | None = None
    window: Count | None = None
    chunk: Count | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "unweighted", "head", "width"] = "none"
    sinks: bool = False
    output_gate: bool = False
    indexer: Indexer | None = None

    @model_validator(mode="before")
    @classmethod
    def _latent_heads(cls, table: Any) -> Any:
        if isinstance(table, dict) and table.get("kind") == "mla" and "n_heads" in table:
            return {"n_kv_heads": table["n_heads"], **table}
        return table

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> Self:
        gqa, mla = ["head_dim"], list(_MLA_FIELDS)
        of_gqa = [*gqa, "rope_dim", "output_gate"]
        needed, foreign = (gqa, [*mla, "q_lora_rank", "indexer"]) if self.kind == "gqa" else (mla, of_gqa)
        missing = [name for name in needed if not getattr(self, name)]
        surplus = [name for name in foreign if getattr(self, name)]
        if self.kind == "mla" and self.qk_norm != "none":
            surplus.append("qk_norm")
        if missing:
            raise ValueError(f"kind = {self.kind!r} needs {', '.join(missing)} > 0")
        if surplus:
            raise ValueError(f"kind = {self.kind!r} has no {', '.join(surplus)}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads = {self.n_kv_heads} must divide n_heads = {self.n_heads}")
        if self.rope_dim is not None and self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim = {self.rope_dim} is more than head_dim = {self.head_dim}")
        spans = [name for name in ("window", "chunk", "indexer") if getattr(self, name) is not None]
        if len(spans) > 1:
            raise ValueError(f"{' and '.join(spans)}: expected one of them at most")
        if self.indexer is not None and self.q_lora_rank is None:
            raise ValueError("indexer: needs q_lora_rank, its queries are projected from the latent of the queries")
        return self

    @property
    def d_qk(self) -> int:
        """Elements per head of a query or key."""
        return self.head_dim if self.kind == "gqa" else self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def d_v(self) -> int:
        """Elements per head of a value."""
        return self.head_dim if self.kind == "gqa" else self.v_head_dim

    @property
    def span(self) -> Literal["full", "window", "chunk", "sparse"]:
        """Which tokens a token sees."""
        if self.window is not None:
            return "window"
        if self.chunk is not None:
            return "chunk"
        return "full" if self.indexer is None else "sparse"

    @property
    def scores(self) -> Indexer | None:
        """The indexer that this layer runs itself."""
        return None if self.indexer is None or self.indexer.shared else self.indexer

    def kv_heads(self, tp: int) -> int:
        """Return the key/value heads of one tensor-parallel shard; fewer heads than shards are replicated."""
        return max(1, self.n_kv_heads // tp)

    def kv_elements(self, tp: int) -> int:
        """Return the cached elements per token and layer that one tensor-parallel shard holds.

        Keys and values together; a latent is shared by all heads, so every shard holds the whole of it. The keys of
        an indexer are not among them.
        """
        if self.kind == "gqa":
            return 2 * self.kv_heads(tp) * self.head_dim
        return self.kv_lora_rank + self.qk_rope_head_dim


class Linear(Frozen):
    """One layer's linear attention: a matrix per head, updated by every token, in place of a cache.

    Attributes
    ----------
    kind : {"gated_delta_net", "lightning", "mamba2"}
        arXiv:2412.06464, arXiv:2401.04658, arXiv:2405.21060.
    n_heads, n_key_heads : int
        Heads of values (each with a state of its own); heads of queries and keys, which groups of them share
        (``mamba2``: the heads, and the groups of B and C).
    key_head_dim, value_head_dim : int
        Elements per head (``mamba2``: the state size, and the head's width).
    conv_kernel : int
        Taps of the causal convolution over queries, keys and values; 0 for none.
    conv_bias : bool
    state_dtype : str
        Element type of the state.
    """

    kind: Literal["gated_delta_net", "lightning", "mamba2"]
    n_heads: Count
    n_key_heads: Count
    key_head_dim: Count
    value_head_dim: Count
    conv_kernel: Size = 0
    conv_bias: bool = False
    state_dtype: Dtype = "fp32"

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.n_heads % self.n_key_heads:
            raise ValueError(f"n_key_heads = {self.n_key_heads} must divide n_heads = {self.n_heads}")
        if self.kind == "lightning" and (self.n_key_heads != self.n_heads or self.conv_kernel):
            raise ValueError("kind = 'lightning' has as many key heads as heads, and no convolution")
        if self.conv_bias and not self.conv_kernel:
            raise ValueError("conv_bias = true needs conv_kernel > 0")
        return self

    @property
    def key_width(self) -> int:
        """Elements of all keys of a token."""
        return self.n_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Elements of all values of a token."""
        return self.n_heads * self.value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values; 0 without one."""
        return 2 * self.key_width + self.value_width if self.conv_kernel else 0

    @property
    def n_scalars(self) -> int:
        """Numbers per token and head beside queries, keys, values and gate: decay and rate, step, or none."""
        return {"gated_delta_net": 2, "lightning": 0, "mamba2": 1}[self.kind]

    @property
    def state_elements(self) -> int:
        """Elements of the states of all heads."""
        return self.n_heads * self.key_head_dim * self.value_head_dim

    @property
    def transition_elements(self) -> int:
        """Elements of what a stretch of tokens does to the states before it: a matrix a head, or a factor."""
        return self.n_heads * (self.key_head_dim**2 if self.kind == "gated_delta_net" else 1)
