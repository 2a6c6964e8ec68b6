"""What is served: the shape of a transformer, as far as its cost and its size depend on it.

A model is a sequence of layers, each with what mixes tokens (attention, linear attention, or nothing) and a
feed-forward network (dense, experts, or none). A file says either one attention and one kind of network for all
layers, with ``first_dense`` leading dense ones, or lists ``[[layer]]`` tables: each stands for ``repeat`` layers, those
marked ``once`` come first, the others are cycled until there are ``n_layers``. What a table does not say is as at the
top of the file. Multi-token-prediction heads and encoders of images or sound are not described.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from g5cp_vec.config._files import locate, read_record
from g5cp_vec.config._machine import Tables
from g5cp_vec.config._record import Count, Few, Frozen, Record, Size
from g5cp_vec.config.attention import Attention, Indexer, Linear
from g5cp_vec.config.dtypes import Dtype, WeightDtype, n_bytes
from g5cp_vec.config.huggingface import is_huggingface, read_huggingface
from g5cp_vec.config.layers import LayerDtypes, LayerKind, Moe
from g5cp_vec.config.weights import Weight, layer_weights

__all__ = ["Attention", "Dtypes", "Indexer", "LayerKind", "LayerTable", "Linear", "Model", "Moe", "load_model"]


# Bytes of all weights at once then stay inside int64.
MOST_PARAMETERS = 2**56


class Dtypes(Frozen):
    """Element types that a checkpoint stores its weights in; what is not said is the model's ``dtype``.

    Attributes
    ----------
    attention, ffn, experts : str or None
        Projections of attention; dense networks and shared experts; routed experts (as `ffn` unless said).
    o_proj, kv_b_proj, indexer : str or None
        Of attention the output projection, the one of latents up to keys and values, and those of an indexer; as
        `attention` unless said.
    embedding, head : str or None
        Embedding table and output projection; as activations unless said. A tied head is the embedding.
    kv : str or None
        Key/value cache; bf16 unless said.
    """

    attention: WeightDtype | None = None
    ffn: WeightDtype | None = None
    experts: WeightDtype | None = None
    o_proj: WeightDtype | None = None
    kv_b_proj: WeightDtype | None = None
    indexer: WeightDtype | None = None
    embedding: Dtype | None = None
    head: WeightDtype | None = None
    kv: Dtype | None = None


class LayerTable(Frozen):
    """One ``[[layer]]`` table of a file.

    Attributes
    ----------
    repeat : int
        Layers in a row that are so.
    once : bool
        Whether these lead the model and are left out of the cycle.
    mixer : {"attention", "linear", "none"} or None
        What mixes tokens; by default "linear" where the table has a linear attention of its own, else "attention".
    ffn : {"dense", "moe", "none"} or None
        By default "moe" where there are experts and the table has no ``d_ff`` of its own, else "dense".
    attention : Attention or None
        In a file, the keys that differ from the model's ``[attention]``.
    linear : Linear or None
    d_ff : int
    moe : Moe or None
    dtypes : LayerDtypes or None
        Element types that differ from the model's.
    """

    repeat: Few = 1
    once: bool = False
    mixer: Literal["attention", "linear", "none"] | None = None
    ffn: Literal["dense", "moe", "none"] | None = None
    attention: Attention | None = None
    linear: Linear | None = None
    d_ff: Size = 0
    moe: Moe | None = None
    dtypes: LayerDtypes | None = None

    def kind(self, model: Model, place: str) -> LayerKind:
        """Return the layer that the table means in a model.

        Raises
        ------
        ValueError
            A part that neither the table nor the model describes.
        """
        mixer = self.mixer or ("linear" if self.linear and not self.attention else "attention")
        attention, linear, moe = self.attention or model.attention, self.linear or model.linear, self.moe or model.moe
        ffn = self.ffn or ("moe" if moe and not self.d_ff else "dense")
        d_ff = self.d_ff or model.d_ff
        for name, wanted, known in (
            ("attention", mixer == "attention", attention),
            ("linear", mixer == "linear", linear),
            ("moe", ffn == "moe", moe),
            ("d_ff", ffn == "dense", d_ff),
        ):
            if wanted and not known:
                what = "expected an integer > 0, the model has dense layers" if name == "d_ff" else "missing"
                raise ValueError(f"{place}{name}: {what}")
        if mixer == ffn == "none":
            raise ValueError(f'{place.removesuffix(".")}: mixer = "none" and ffn = "none" leave an empty layer')
        return LayerKind(
            attention={"attention": attention, "linear": linear, "none": None}[mixer],
            ffn=ffn,
            d_ff=d_ff if ffn == "dense" else 0,
            moe=moe if ffn == "moe" else None,
            dtypes=self.dtypes,
            gated=model.gated,
            ffn_bias=model.ffn_bias,
            norms=model.norms,
            norm_bias=model.norm_bias,
        )


class Model(Record):
    """A transformer.

    Attributes
    ----------
    hidden, vocab, n_layers : int
    attention : Attention or None
        Of all layers that say nothing else; None only where each does.
    linear : Linear or None
        Linear attention of the layers that have it.
    d_ff : int
        Inner width of a dense feed-forward network (0 only where no layer is dense).
    moe : Moe or None
    first_dense : int
        Leading layers that are dense although the model has experts.
    layer : tuple of LayerTable
        Layers one by one or in cycles, in place of `first_dense`.
    gated : bool
        Whether feed-forward networks have gate, up and down projections, or only the latter two.
    ffn_bias : bool
        Whether the projections of feed-forward networks and experts have biases.
    norms : {"pre", "sandwich", "parallel"}
        One norm for each half of a layer, on its way in (or out); two, in and out; or one for the whole layer, whose
        halves both start from it.
    norm_bias : bool
        Whether norms have biases beside their weights.
    tie_embeddings : bool
        Whether the output projection is the embedding matrix.
    head_bias : bool
        Whether the output projection has a bias, one number for each token of the vocabulary.
    dtype : str
        Element type the weights are published in; a deployment may choose another.
    dtypes : Dtypes or None
        What is published in another type.
    source : str
        Where the numbers are from.
    notes : tuple of str
        What was left out or assumed when the file was read; shown wherever the model is used.
    """

    hidden: Count
    vocab: Count
    n_layers: Few
    d_ff: Size = 0
    attention: Attention | None = None
    linear: Linear | None = None
    moe: Moe | None = None
    first_dense: Size = 0
    layer: Annotated[tuple[LayerTable, ...], Tables] = ()
    gated: bool = True
    ffn_bias: bool = False
    norms: Literal["pre", "sandwich", "parallel"] = "pre"
    norm_bias: bool = False
    tie_embeddings: bool = False
    head_bias: bool = False
    dtype: WeightDtype
    dtypes: Dtypes | None = None
    source: str = ""
    notes: Annotated[tuple[str, ...], Tables] = ()

    @model_validator(mode="before")
    @classmethod
    def _inherit_attention(cls, table: Any) -> Any:
        """Let the attention of a layer be as the model's where it says nothing else and is of its kind."""
        if not isinstance(table, dict) or not isinstance(table.get("layer"), list):
            return table
        model_s = table.get("attention")

        def inherited(layer: Any) -> Any:
            own = layer.get("attention") if isinstance(layer, dict) else None
            if not isinstance(own, dict) or not isinstance(model_s, dict):
                return layer
            if own.get("kind", model_s.get("kind")) != model_s.get("kind"):
                return layer
            return {**layer, "attention": {**model_s, **own}}

        return {**table, "layer": [inherited(layer) for layer in table["layer"]]}

    @model_validator(mode="after")
    def _layers_fit(self) -> Self:
        if self.layer and self.first_dense:
            raise ValueError("first_dense: the [[layer]] tables say which layers are dense; leave the key out")
        if self.moe is None and self.first_dense:
            raise ValueError("first_dense: a model without [moe] is dense throughout; leave the key out")
        if self.first_dense >= self.n_layers:
            raise ValueError(f"first_dense = {self.first_dense}: expected less than n_layers = {self.n_layers}")
        distinct = self.kinds[0]
        if self.norms == "parallel" and any(kind.attention is None or kind.ffn == "none" for kind in distinct):
            raise ValueError('norms = "parallel": expected attention and a feed-forward network in every layer')
        if len({kind.moe.top_k for kind in distinct if kind.moe}) > 1:
            raise ValueError("layers whose experts differ in top_k are not modelled")
        if self._parameter_bound() > MOST_PARAMETERS:
            raise ValueError(f"more than {MOST_PARAMETERS} parameters: exact byte counts would leave 64 bits")
        return self

    def _parameter_bound(self) -> int:
        """Return an upper bound of the number of parameters."""
        return self.n_layers * max(map(self._layer_bound, self.kinds[0])) + 2 * self.vocab * self.hidden

    def _layer_bound(self, kind: LayerKind) -> int:
        total = 3 * self.hidden * (kind.d_ff + 1)
        if (a := kind.softmax) is not None:
            heads = a.n_heads * (2 * a.d_qk + a.d_v) + 2 * a.n_kv_heads * a.d_qk
            if a.indexer is not None:
                heads += (a.indexer.n_heads + 1) * (a.indexer.head_dim + 1)
            total += 2 * (self.hidden + (a.q_lora_rank or 0) + a.kv_lora_rank) * (heads + a.kv_lora_rank + self.hidden)
        if (m := kind.linear) is not None:
            total += (self.hidden + m.conv_kernel) * (2 * m.key_width + 3 * m.value_width + 4 * m.n_heads)
        if kind.moe is not None:
            total += 4 * self.hidden * (kind.moe.n_experts * (kind.moe.d_expert + 1) + kind.moe.shared_width + 1)
        return total

    @cached_property
    def kinds(self) -> tuple[list[LayerKind], list[int]]:
        """Distinct layer kinds in order of appearance, and the kind (an index) of each layer."""
        distinct = list(dict.fromkeys(self.layers))
        index = {kind: i for i, kind in enumerate(distinct)}
        return distinct, [index[layer] for layer in self.layers]

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """The layers, first to last, `n_layers` of them."""
        if not self.layer:
            n_dense = self.n_layers if self.moe is None else self.first_dense
            runs = [(LayerTable(ffn="dense"), n_dense), (LayerTable(ffn="moe"), self.n_layers - n_dense)]
            return tuple(kind for table, n in runs if n for kind in n * (table.kind(self, ""),))
        first: list[LayerKind] = []
        cycled: list[LayerKind] = []
        for i, table in enumerate(self.layer):
            if table.once and cycled:
                raise ValueError(f"layer[{i}].once: the layers that come once lead; move the table up")
            (first if table.once else cycled).extend(table.repeat * [table.kind(self, f"layer[{i}].")])
        n = len(first) + len(cycled)
        if n > self.n_layers or (n < self.n_layers and not cycled):
            raise ValueError(f"the [[layer]] tables describe {n} layers, n_layers = {self.n_layers}")
        return tuple(first + list(islice(cycle(cycled), self.n_layers - len(first))))

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(kind.moe is not None for kind in self.kinds[0])

    @property
    def top_k(self) -> int:
        """Experts that a token visits in a layer that has any; 0 without experts."""
        return max((kind.moe.top_k for kind in self.kinds[0] if kind.moe), default=0)

    @property
    def default_dtypes(self) -> Dtypes:
        """The types that weights and cache are published in, all filled in but those that follow activations."""
        written = self.dtypes or Dtypes()
        attention, ffn = written.attention or self.dtype, written.ffn or self.dtype
        return Dtypes(
            attention=attention,
            ffn=ffn,
            experts=written.experts or ffn,
            o_proj=written.o_proj or attention,
            kv_b_proj=written.kv_b_proj or attention,
            indexer=written.indexer or attention,
            embedding=written.embedding,
            head=written.embedding if self.tie_embeddings else written.head,
            kv=written.kv or "bf16",
        )

    def kv_bytes_per_token(self, dtype: str = "bf16") -> int:
        """Return the bytes that one more token adds to the caches of all layers, before any window is full.

        Keys and values (or latents) in `dtype`, and the keys of indexers in their own; linear layers add none.
        """
        softmax = [kind.softmax for kind in self.layers if kind.softmax is not None]
        keys = sum(a.scores.key_bytes for a in softmax if a.scores is not None)
        return keys + sum(int(n_bytes(a.kv_elements(1), dtype)) for a in softmax)

    @cached_property
    def _weights(self) -> list[tuple[int, Weight, LayerKind | None]]:
        """(number of such, weight, layer kind) of everything; multi-token-prediction heads left out."""
        tables = 1 if self.tie_embeddings else 2
        names = ("embedding", "head")[:tables]
        everything: list[tuple[int, Weight, LayerKind | None]] = [
            (1, Weight(name, name, self.vocab, self.hidden), None) for name in names
        ]
        everything.append((1, Weight("norms", "activation", 1, self.hidden * (1 + self.norm_bias)), None))
        everything.append((1, Weight("head", "activation", 1, self.vocab * self.head_bias), None))
        distinct, sequence = self.kinds
        for i, n in Counter(sequence).items():
            everything += [(n, weight, distinct[i]) for weight in layer_weights(self.hidden, distinct[i])]
        return everything

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Exact number of parameters by module, multi-token-prediction heads left out."""
        total: Counter[str] = Counter()
        for n, weight, _ in self._weights:
            total[weight.module] += n * weight.elements
        return dict(total)

    @property
    def n_parameters(self) -> int:
        """Exact number of parameters, multi-token-prediction heads left out."""
        return sum(self.parameters.values())

    @property
    def n_active_parameters(self) -> int:
        """Parameters less the routed experts that a token does not visit; the embedding table counts whole."""
        idle = 0
        for n, weight, kind in self._weights:
            if weight.module == "experts" and kind is not None and kind.moe is not None:
                # Every expert has the same weights.
                idle += n * weight.elements // kind.moe.n_experts * (kind.moe.n_experts - kind.moe.top_k)
        return self.n_parameters - idle


def load_model(name_or_path: str, base: Path | None = None) -> Model:
    """Return a model by preset name, by the path of a TOML file, or of a ``config.json`` or the folder with one.

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
    if is_huggingface(path):
        path, table = read_huggingface(path)
        return read_record(Model, path, table)
    return read_record(Model, path)
