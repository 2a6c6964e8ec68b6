"""What is served: the shape of a transformer, as far as its cost depends on it.

A model is a stack of layers, each an attention and a feed-forward network (SwiGLU: gate, up and down projection).
Attention is grouped-query (``gqa``, which covers multi-head) or multi-head latent (``mla``). Norms, biases, rotary
embeddings and auxiliary prediction heads are not described.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from g5cp_vec.config._files import locate, read_record
from g5cp_vec.config._record import Count, Frozen, Record
from g5cp_vec.config.dtypes import Dtype
from g5cp_vec.errors import ConfigError

_MLA_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_Size = Annotated[int, Field(ge=0)]


# Bytes of all weights at once then stay inside int64.
MOST_PARAMETERS = 2**56


class Attention(Frozen):
    """One layer's attention.

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
    """

    kind: Literal["gqa", "mla"]
    n_heads: Count
    n_kv_heads: Count
    head_dim: _Size = 0
    q_lora_rank: Count | None = None
    kv_lora_rank: _Size = 0
    qk_nope_head_dim: _Size = 0
    qk_rope_head_dim: _Size = 0
    v_head_dim: _Size = 0

    @model_validator(mode="before")
    @classmethod
    def _latent_heads(cls, table: Any) -> Any:
        if isinstance(table, dict) and table.get("kind") == "mla" and "n_heads" in table:
            return {"n_kv_heads": table["n_heads"], **table}
        return table

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> Self:
        gqa, mla = ["head_dim"], list(_MLA_FIELDS)
        needed, foreign = (gqa, [*mla, "q_lora_rank"]) if self.kind == "gqa" else (mla, gqa)
        missing = [name for name in needed if not getattr(self, name)]
        surplus = [name for name in foreign if getattr(self, name)]
        if missing:
            raise ValueError(f"kind = {self.kind!r} needs {', '.join(missing)} > 0")
        if surplus:
            raise ValueError(f"kind = {self.kind!r} has no {', '.join(surplus)}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads = {self.n_kv_heads} must divide n_heads = {self.n_heads}")
        return self

    @property
    def d_qk(self) -> int:
        """Elements per head of a query or key."""
        return self.head_dim if self.kind == "gqa" else self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def d_v(self) -> int:
        """Elements per head of a value."""
        return self.head_dim if self.kind == "gqa" else self.v_head_dim

    def kv_heads(self, tp: int) -> int:
        """Return the key/value heads of one tensor-parallel shard; fewer heads than shards are replicated."""
        return max(1, self.n_kv_heads // tp)

    def kv_elements(self, tp: int) -> int:
        """Return the cached elements per token and layer that one tensor-parallel shard holds.

        Keys and values together; a latent is shared by all heads, so every shard holds the whole of it.
        """
        if self.kind == "gqa":
            return 2 * self.kv_heads(tp) * self.head_dim
        return self.kv_lora_rank + self.qk_rope_head_dim


class Moe(Frozen):
    """A mixture-of-experts feed-forward network.

    Attributes
    ----------
    n_experts, top_k : int
        Routed experts, and how many of them a token visits.
    d_expert : int
        Inner width of one expert.
    n_shared : int
        Experts, of the same width, that every token visits.
    """

    n_experts: Count
    top_k: Count
    d_expert: Count
    n_shared: _Size = 0

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k = {self.top_k} is more than n_experts = {self.n_experts}")
        return self


class LayerKind(Frozen):
    """What distinguishes one layer from another."""

    attention: Attention
    ffn: Literal["dense", "moe"]


class Model(Record):
    """A transformer.

    Attributes
    ----------
    hidden, vocab, n_layers : int
    d_ff : int
        Inner width of a dense feed-forward network (0 only where no layer is dense).
    moe : Moe or None
    first_dense : int
        Leading layers that are dense although the model has experts.
    tie_embeddings : bool
        Whether the output projection is the embedding matrix.
    dtype : str
        Element type the weights are published in; a deployment may choose another.
    source : str
        Where the numbers are from.
    """

    hidden: Count
    vocab: Count
    n_layers: Count
    d_ff: _Size = 0
    attention: Attention
    moe: Moe | None = None
    first_dense: _Size = 0
    tie_embeddings: bool = False
    dtype: Dtype
    source: str = ""

    @model_validator(mode="after")
    def _layers_fit(self) -> Self:
        if self.moe is None and self.first_dense:
            raise ValueError("first_dense: a model without [moe] is dense throughout; leave the key out")
        if self.first_dense >= self.n_layers:
            raise ValueError(f"first_dense = {self.first_dense}: expected less than n_layers = {self.n_layers}")
        if self.has_dense_layers and not self.d_ff:
            raise ValueError("d_ff: expected an integer > 0, the model has dense layers")
        if self._parameter_bound() > MOST_PARAMETERS:
            raise ValueError(f"more than {MOST_PARAMETERS} parameters: exact byte counts would leave 64 bits")
        return self

    def _parameter_bound(self) -> int:
        """Return an upper bound of the number of parameters."""
        a = self.attention
        heads = a.n_heads * (a.d_qk + a.d_v) + 2 * a.n_kv_heads * a.d_qk
        attention = (self.hidden + (a.q_lora_rank or 0) + a.kv_lora_rank) * (heads + a.kv_lora_rank + self.hidden)
        ffn = 3 * self.hidden * self.d_ff
        if self.moe is not None:
            ffn += self.hidden * (self.moe.n_experts + 3 * self.moe.d_expert * (self.moe.n_experts + self.moe.n_shared))
        return self.n_layers * (2 * attention + ffn) + 2 * self.vocab * self.hidden

    @cached_property
    def kinds(self) -> tuple[list[LayerKind], list[int]]:
        """Distinct layer kinds in order of appearance, and the kind (an index) of each layer."""
        distinct = list(dict.fromkeys(self.layers))
        index = {kind: i for i, kind in enumerate(distinct)}
        return distinct, [index[layer] for layer in self.layers]

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has a dense feed-forward network."""
        return self.moe is None or self.first_dense > 0

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """The layers, first to last, `n_layers` of them."""
        n_dense = self.n_layers if self.moe is None else self.first_dense
        dense = LayerKind(attention=self.attention, ffn="dense")
        moe = LayerKind(attention=self.attention, ffn="moe")
        return (dense,) * n_dense + (moe,) * (self.n_layers - n_dense)


def load_model(name_or_path: str, base: Path | None = None) -> Model:
    """Return a model by preset name or TOML path.

    Parameters
    ----------
    name_or_path : str
    base : Path, optional
        Folder that a relative path is looked up in before the working directory.

    Raises
    ------
    ConfigError
        Unknown name, unreadable file, wrong or missing keys.
    """
    path = locate("models", name_or_path, base)
    if path.suffix == ".json":
        keys, attention, moe = (", ".join(schema.model_fields) for schema in (Model, Attention, Moe))
        raise ConfigError(
            f"{path}: a Hugging Face config.json is not read in this version; write a TOML with the keys {keys}; "
            f"[attention] with {attention}; and, for a model with experts, [moe] with {moe}"
        )
    return read_record(Model, path)
