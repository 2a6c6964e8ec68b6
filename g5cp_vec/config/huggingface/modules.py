"""What a checkpoint calls its modules, and which of them a list of patterns means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

# Names of a layer's place: of the text model alone, and within a model of several kinds of input.
_PLACES = (
    "model.layers",
    "language_model.model.layers",
    "model.language_model.layers",
    "model.language_model.model.layers",
)
_HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")
_EMBEDDINGS = ("model.embed_tokens", "language_model.model.embed_tokens", "model.language_model.embed_tokens")

Matcher = Callable[[str], bool]
# Modules of attention that may be stored otherwise than the rest of it, by the class they are of.
ATTENTION_PARTS = {
    "o_proj": re.compile(r"\.(o_proj|out_proj)$"),
    "kv_b_proj": re.compile(r"\.kv_b_proj$"),
    "indexer": re.compile(r"\.indexer\."),
}
_PLAIN = re.compile(r"[\w-]+(?:\.[\w-]+)*")


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
        modules: tuple[str, ...] = ()
        if "attention" in layer:
            modules = self._of_attention(layer["attention"])
        elif "linear" in layer:
            modules = self.linear
        parts: dict[str, tuple[str, ...]] = {}
        for module in modules:
            part = next((part for part, is_of in ATTENTION_PARTS.items() if is_of.search(module)), "attention")
            parts[part] = (*parts.get(part, ()), module)
        yield from parts.items()
        if layer.get("ffn") == "dense":
            yield "ffn", self.network
        elif layer.get("ffn") == "moe":
            yield "experts", self.experts
            if layer["moe"].get("n_shared"):
                yield "ffn", self.shared

    def _of_attention(self, attention: Mapping[str, Any]) -> tuple[str, ...]:
        modules = self.attention
        if attention["kind"] == "mla" and attention["q_lora_rank"] is None:
            modules = ("self_attn.q_proj", *(name for name in modules if not name.startswith("self_attn.q_")))
        if (indexer := attention.get("indexer")) and not indexer["shared"]:
            modules += prefixed("self_attn.indexer.", "wq_b", "wk")
        return modules

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


# Families whose checkpoints have other names than Llama's.
MLA = prefixed("self_attn.", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SHARED = prefixed("mlp.shared_experts.", *PROJECTIONS)
DEEPSEEK = Names(attention=MLA, shared=SHARED)
QWEN = Names(shared=prefixed("mlp.shared_expert.", *PROJECTIONS))
QWEN_DELTA = Names(linear=prefixed("linear_attn.", "in_proj_qkv", "in_proj_z", "out_proj"), shared=QWEN.shared)
BLOCK_SPARSE = Names(experts=prefixed("block_sparse_moe.experts.0.", "w1", "w2", "w3"))
MINIMAX = Names(experts=BLOCK_SPARSE.experts, linear=prefixed("self_attn.", "qkv_proj", "output_gate", "out_proj"))
PHI = Names(
    attention=prefixed("self_attn.", "qkv_proj", "o_proj"), network=prefixed("mlp.", "gate_up_proj", "down_proj")
)
GLM = Names(network=PHI.network)
LLAMA4 = Names(
    network=prefixed("feed_forward.", *PROJECTIONS),
    experts=prefixed("feed_forward.experts.0.", *PROJECTIONS),
    shared=prefixed("feed_forward.shared_expert.", *PROJECTIONS),
)
UNGATED = prefixed("mlp.", "up_proj", "down_proj")
NEMOTRON_H = Names(
    attention=prefixed("mixer.", "q_proj", "k_proj", "v_proj", "o_proj"),
    linear=prefixed("mixer.", "in_proj", "out_proj"),
    network=prefixed("mixer.", "up_proj", "down_proj"),
    experts=prefixed("mixer.experts.0.", "up_proj", "down_proj"),
    shared=prefixed("mixer.shared_experts.", "up_proj", "down_proj"),
    places=("backbone.layers", "model.layers", "language_model.backbone.layers"),
)


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
    """Return the matcher of transformers' lists: whole parts of the name, or a regular expression from its start.

    ``"layers.1"`` means ``layers.1.mlp``, not ``layers.11.mlp``; ``"gate"`` means ``mlp.gate``, not ``mlp.gate_proj``.
    """
    listed = list(patterns)
    plain = {pattern for pattern in listed if _PLAIN.fullmatch(pattern)}
    expression = _any_of(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))" for pattern in listed if pattern not in plain)

    def matches(name: str) -> bool:
        parts = name.split(".")
        ends = range(1, len(parts) + 1)
        return any(".".join(parts[i:j]) in plain for j in ends for i in range(j)) or expression(name)

    return matches


def names_or_expressions(patterns: Iterable[str]) -> Matcher:
    """Return the matcher of compressed-tensors: whole names, or regular expressions after ``re:``."""
    return _any_of(p.removeprefix("re:") if p.startswith("re:") else re.escape(p) + "$" for p in patterns)


def wildcards(patterns: Iterable[str]) -> Matcher:
    """Return the matcher of ModelOpt: names of modules, which mean what is in them too, with ``*`` for any text."""
    listed = list(patterns)
    # A checkpoint may name every expert: plain names are looked up.
    plain = {pattern for pattern in listed if _PLAIN.fullmatch(pattern)}
    expression = _any_of(rf"{translate(p)}|{re.escape(p)}\." for p in listed if p not in plain)

    def matches(name: str) -> bool:
        ends = [i for i, letter in enumerate(name) if letter == "."] + [len(name)]
        return any(name[:end] in plain for end in ends) or expression(name)

    return matches
