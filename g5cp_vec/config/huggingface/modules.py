"""What a checkpoint calls its modules, and which of them a list of patterns means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

# Names of a layer's place: of the text model alone, and within a model of several kinds of input.
_PLACES = ("model.layers", "language_model.model.layers", "model.language_model.layers", "model.language_model.model.layers")
_HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")
_EMBEDDINGS = ("model.embed_tokens", "language_model.model.embed_tokens", "model.language_model.embed_tokens")

Matcher = Callable[[str], bool]


@dataclass(frozen=True)
class Names:
    """The modules of a layer.

    Attributes
    ----------
    attention, linear, network, experts, shared : tuple of str
        Matrices of attention, of linear attention, of a dense network, of an expert, of the shared experts.
    places : tuple of str
        What stands before the number of a layer.
    """

    attention: tuple[str, ...] = tuple(f"self_attn.{name}_proj" for name in "qkvo")
    linear: tuple[str, ...] = ("linear_attn.in_proj_qkvz", "linear_attn.out_proj")
    network: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    experts: tuple[str, ...] = ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj")
    shared: tuple[str, ...] = ()
    places: tuple[str, ...] = _PLACES

    def of_layer(self, layer: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield classes of weights (keys of ``dtypes``) with the modules that a layer has of each."""
        if "attention" in layer:
            yield "attention", self.attention
        elif "linear" in layer:
            yield "attention", self.linear
        if layer.get("ffn") == "dense":
            yield "ffn", self.network
        elif layer.get("ffn") == "moe":
            yield "experts", self.experts
            if layer["moe"].get("n_shared"):
                yield "ffn", self.shared

    def spellings(self, layer: int, module: str) -> list[str]:
        """Return every full name that a module of a layer may have."""
        return [f"{place}.{layer}.{module}" for place in self.places]


def prefixed(prefix: str, *names: str) -> tuple[str, ...]:
    """Return names with a prefix.

    Examples
    --------
    >>> prefixed("mlp.", "up", "down")
    ('mlp.up', 'mlp.down')
    """
    return tuple(prefix + name for name in names)


def names_of_head() -> tuple[str, ...]:
    """Return every name of the output projection."""
    return _HEADS


def names_of_embedding() -> tuple[str, ...]:
    """Return every name of the embedding table."""
    return _EMBEDDINGS


def _any_of(patterns: Iterable[str]) -> Matcher:
    combined = "|".join(f"(?:{pattern})" for pattern in patterns)
    if not combined:
        return lambda name: False
    compiled = re.compile(combined)
    return lambda name: compiled.match(name) is not None


def boundaries(patterns: Iterable[str]) -> Matcher:
    """Return the matcher of transformers' lists: a regular expression from the start, a part or an end of the name.

    ``"layers.1"`` means ``layers.1.mlp`` and not ``layers.11.mlp``; ``"gate"`` means ``mlp.gate`` and not ``mlp.gate_proj``.
    """
    listed = list(patterns)
    parts = [rf"(?:.*\.)?{re.escape(pattern)}(?:\.|$)" for pattern in listed]
    return _any_of([*(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))" for pattern in listed), *parts])


def names_or_expressions(patterns: Iterable[str]) -> Matcher:
    """Return the matcher of compressed-tensors: whole names, or regular expressions after ``re:``."""
    return _any_of(p.removeprefix("re:") if p.startswith("re:") else re.escape(p) + "$" for p in patterns)


def wildcards(patterns: Iterable[str]) -> Matcher:
    """Return the matcher of ModelOpt: names of modules, which mean what is in them too, with ``*`` for any text."""
    return _any_of(rf"{translate(p)}|{re.escape(p)}\." for p in patterns)
