"""Which element type a quantised checkpoint stores each class of weights in.

``quantization_config`` names a method, its format, and the modules that are left as they were; ModelOpt writes the same
into ``hf_quant_config.json`` beside it. The answer is one type for each class of :class:`g5cp_vec.config.model.Dtypes`
in each layer; a layer that stores one class in two types is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from g5cp_vec.config.huggingface.modules import (
    ATTENTION_PARTS,
    Matcher,
    Names,
    boundaries,
    names_of_embedding,
    names_of_head,
    names_or_expressions,
    wildcards,
)
from g5cp_vec.config.huggingface.source import Keys, shown

_NESTED_REPETITION = re.compile(r"[*+}]\)[*+{]")
_CLASSES = {
    "attention": "matrices of attention", "o_proj": "output projections", "kv_b_proj": "projections of latents",
    "indexer": "matrices of an indexer", "ffn": "matrices of a network", "experts": "matrices of experts",
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """One format, the modules that have it and those among them that don't.

    Attributes
    ----------
    dtype : str
    has, lacks : callable
        Whether a module has the format by its name, and whether it is left out.
    head : bool
        Whether the output projection is among what can have it.
    classes : tuple of str
        Classes of weights that can have it.
    """

    dtype: str
    has: Matcher
    lacks: Matcher
    head: bool = False
    classes: tuple[str, ...] = ("attention", "ffn", "experts")

    def applies(self, names: Sequence[str]) -> bool:
        """Whether a module under any of its names is stored so."""
        return any(map(self.has, names)) and not any(map(self.lacks, names))


@dataclass(frozen=True)
class Quantisation:
    """What a ``quantization_config`` says.

    Attributes
    ----------
    keys : Keys
        Where it stands.
    rules : tuple of Rule
        The first that applies to a module decides.
    kv : str or None
        Element type of the cache.
    notes : tuple of str
        What is not as the format says.
    """

    keys: Keys
    rules: tuple[Rule, ...]
    kv: str | None = None
    notes: tuple[str, ...] = ()

    def dtypes(
        self, names: Names, layers: Sequence[Mapping[str, Any]], base: str
    ) -> tuple[dict[str, str], list[dict[str, str]]]:
        """Return the type of each class of weights in most layers, and for each layer those that differ.

        ``base`` is the type of whatever is not quantised.
        """
        stored = []
        for i, layer in enumerate(layers):
            stored.append({w: self._class_dtype(names, i, w, modules, base) for w, modules in names.of_layer(layer)})
        for part in ATTENTION_PARTS:
            if all(types.get(part) == types.get("attention") for types in stored if part in types):
                for types in stored:
                    types.pop(part, None)
        counts: dict[str, Counter[str]] = {}
        for types in stored:
            for weights, dtype in types.items():
                counts.setdefault(weights, Counter())[dtype] += 1
        most = {weights: count.most_common(1)[0][0] for weights, count in counts.items()}
        return most, [{w: dtype for w, dtype in types.items() if dtype != most[w]} for types in stored]

    def head(self, base: str) -> str:
        """Return the type of the output projection."""
        return self._dtype("head", names_of_head(), base)

    def _class_dtype(self, names: Names, layer: int, weights: str, modules: Sequence[str], base: str) -> str:
        types: dict[str, str] = {}
        for module in modules:
            types.setdefault(self._dtype(weights, names.spellings(layer, module), base), module)
        if len(types) > 1:
            what = " and ".join(f"{module} in {dtype}" for dtype, module in types.items())
            self.keys.refuse(
                "", f"{_CLASSES[weights]} of one layer in several types are not modelled (layer {layer}: {what})"
            )
        return next(iter(types))

    def _dtype(self, weights: str, names: Sequence[str], base: str) -> str:
        for rule in self.rules:
            of_class = "attention" if weights in ATTENTION_PARTS else weights
            if (rule.head if weights == "head" else of_class in rule.classes) and rule.applies(names):
                return rule.dtype
        return base


def _everything(_: str) -> bool:
    return True


def _patterns(keys: Keys, *names: str) -> list[str]:
    """Return the union of lists of modules."""
    found: list[str] = []
    for name in names:
        value = keys.raw(name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
            keys.wrong(name, "a list of names of modules")
        found += value
    return found


def _matcher(keys: Keys, key: str, make: Callable[[Iterable[str]], Matcher], patterns: Sequence[str]) -> Matcher:
    for pattern in patterns:
        if _NESTED_REPETITION.search(pattern):
            keys.refuse(key, f"{shown(pattern)} repeats a repetition, which may take for ever to match")
    try:
        return make(patterns)
    except (re.error, RecursionError, OverflowError) as error:
        keys.refuse(key, f"is not a list of regular expressions: {error}")


def read_quantisation(keys: Keys) -> Quantisation:
    """Read a ``quantization_config``.

    Raises
    ------
    ConfigError
        A method or format that is not modelled.
    """
    method = keys.text("quant_method").lower().replace("_", "-") if keys.says("quant_method") else "modelopt"
    if method not in _METHODS:
        keys.refuse("quant_method", f"{shown(method)} is not modelled; modelled: {', '.join(_METHODS)}")
    return _METHODS[method](keys)


def _fp8(keys: Keys) -> Quantisation:
    dtype = "fp8" if keys.raw("weight_block_size") is None else _block(keys, "weight_block_size")
    lacks = _matcher(
        keys, "modules_to_not_convert", boundaries, _patterns(keys, "modules_to_not_convert", "ignored_layers")
    )
    return Quantisation(keys, (Rule(dtype, _everything, lacks),))


def _block(keys: Keys, key: str) -> str:
    block = keys.raw(key)
    if block == [128, 128]:
        return "fp8_block"
    if block in ([1, 32], [32, 1]):
        return "mxfp8"
    return keys.refuse(key, f"blocks of {block!r:.40} are not modelled, expected [128, 128] or [1, 32]")


def _mxfp4(keys: Keys) -> Quantisation:
    # Only experts, whose module holds them all: transformers converts nothing else.
    lacks = _matcher(keys, "modules_to_not_convert", boundaries, _patterns(keys, "modules_to_not_convert"))
    return Quantisation(keys, (Rule("mxfp4", _everything, lacks, classes=("experts",)),))


def _integer_format(keys: Keys, bits: int, group: int | None, *, zeros: bool, key: str, alone: bool = True) -> str:
    """Return the format of integers with one scale for `group` inputs (None: a row); `alone` where inputs stay wide."""
    if bits == 8 and group is None and not zeros:
        return "int8_a16" if alone else "int8"
    dtype = f"int{bits}_group{group}{'_zeros' if zeros else ''}"
    if bits not in (4, 8) or group not in (32, 64, 128) or (bits == 8 and not alone):
        what = f"{bits}-bit integers in groups of {group}" if group else f"{bits}-bit integers with a scale a row"
        both = "" if alone else " of weights and inputs"
        keys.refuse(
            key, f"{what}{both} are not modelled; expected 4 or 8 bits in groups of 32, 64 or 128, or 8 bits a row"
        )
    return dtype


def _group(keys: Keys, key: str = "group_size") -> int | None:
    size = keys.raw(key)
    return None if size in (None, -1) else keys.count(key)


def _awq(keys: Keys) -> Quantisation:
    bits = keys.count("bits" if keys.says("bits") else "w_bit")
    group = _group(keys, "group_size" if "group_size" in keys.values else "q_group_size")
    zeros = keys.flag("zero_point") if keys.says("zero_point") else True
    dtype = _integer_format(keys, bits, group, zeros=zeros, key="bits")
    lacks = _matcher(keys, "modules_to_not_convert", boundaries, _patterns(keys, "modules_to_not_convert"))
    return Quantisation(keys, (Rule(dtype, _everything, lacks),))


def _gptq(keys: Keys) -> Quantisation:
    for key in ("dynamic", "extra_config", "modules_in_block_to_quantize"):
        if keys.raw(key):
            keys.refuse(key, "modules with formats of their own are not modelled")
    symmetric = keys.flag("sym") if keys.says("sym") else True
    # Kernels for symmetric integers drop the zero points, which are all the same.
    dtype = _integer_format(keys, keys.count("bits"), _group(keys), zeros=not symmetric, key="bits")
    lacks = _matcher(keys, "modules_to_not_convert", boundaries, _patterns(keys, "modules_to_not_convert"))
    head = keys.flag("lm_head") if keys.says("lm_head") else False
    return Quantisation(keys, (Rule(dtype, _everything, lacks, head=head),))


def _bitsandbytes(keys: Keys) -> Quantisation:
    if keys.flag("load_in_4bit"):
        keys.refuse("load_in_4bit", "bitsandbytes' 4-bit formats are not modelled")
    if not keys.flag("load_in_8bit"):
        keys.refuse("load_in_8bit", "expected true")
    skipped = _patterns(keys, "llm_int8_skip_modules")
    lacks = _matcher(keys, "llm_int8_skip_modules", boundaries, skipped)
    return Quantisation(keys, (Rule("int8", _everything, lacks),))


def _compressed_tensors(keys: Keys) -> Quantisation:
    groups, rules = keys.table("config_groups"), []
    if groups is None:
        keys.refuse("config_groups", "missing")
    ignored = _matcher(keys, "ignore", names_or_expressions, _patterns(keys, "ignore"))
    for name in groups.values:
        group = groups.table(name)
        weights = None if group is None else group.table("weights")
        if group is None or weights is None:
            groups.refuse(name, "expected a group with weights; formats of activations alone are not modelled")
        targets = _patterns(group, "targets")
        # A class of modules means every matrix; an embedding is quantised by its name alone.
        everywhere = not targets or "Linear" in targets
        has = _everything if everywhere else _matcher(group, "targets", names_or_expressions, targets)
        if any(has(embedding) for embedding in names_of_embedding() if not everywhere) or "Embedding" in targets:
            group.refuse("targets", "quantised embeddings are not modelled")
        alone = group.table("input_activations") is None
        rules.append(Rule(_weights_format(weights, alone=alone), has, ignored, head=True))
    return Quantisation(keys, tuple(rules), _cache(keys))


def _weights_format(weights: Keys, *, alone: bool) -> str:
    """Return the format of compressed-tensors' ``weights``; `alone` where their inputs are not narrowed."""
    bits, kind = weights.count("num_bits"), weights.text("type")
    group = _group(weights)
    strategy = weights.text("strategy") if weights.says("strategy") else "tensor" if group is None else "group"
    if kind == "int":
        symmetric = weights.flag("symmetric") if weights.says("symmetric") else True
        return _integer_format(weights, bits, group, zeros=not symmetric, key="num_bits", alone=alone)
    if kind == "float" and bits == 8 and strategy in ("tensor", "channel"):
        return "fp8_a16" if alone else "fp8"
    if kind == "float" and bits == 8 and strategy == "block":
        return _block(weights, "block_structure")
    known = {"4 by 16": "nvfp4", "4 by 32": "mxfp4", "8 by 32": "mxfp8"}
    if kind == "float" and (dtype := known.get(f"{bits} by {group}")) is not None:
        return f"{dtype}_a16" if alone and bits == 4 else dtype
    return weights.refuse("type", f"{bits} bits of {shown(kind)} by {strategy} (group {group}) are not modelled")


def _cache(keys: Keys) -> str | None:
    """Return the element type of the cache where the checkpoint has scales for it."""
    scheme = keys.table("kv_cache_scheme")
    if scheme is None:
        return None
    bits, kind = scheme.count("num_bits"), scheme.text("type")
    if bits != 8 or kind not in ("float", "int"):
        scheme.refuse("num_bits", f"a cache of {bits} bits of {shown(kind)} is not modelled")
    return "fp8" if kind == "float" else "int8"


_ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8_block",
    "FP8_PB_REAL": "fp8_block",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4_a16",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
}


def _modelopt(keys: Keys) -> Quantisation:
    nested = keys.table("quantization")  # as hf_quant_config.json has it
    inner = keys if nested is None else nested
    algorithm = inner.raw("quant_algo")
    kv = inner.raw("kv_cache_quant_algo")
    if kv not in (None, "FP8", "INT8"):
        inner.refuse("kv_cache_quant_algo", f"{shown(kv)} is not modelled, expected FP8, INT8 or null")
    cache = {"FP8": "fp8", "INT8": "int8"}.get(kv) or _cache(inner)
    if algorithm is None and kv is not None:
        return Quantisation(inner, (), cache)
    lists = ("ignore", "exclude_modules", "modules_to_not_convert")
    lacks = _matcher(inner, "ignore", wildcards, _patterns(inner, *lists))
    if algorithm != "MIXED_PRECISION":
        return Quantisation(
            inner, (Rule(_algorithm(inner), _everything, lacks, head=True),), cache, _notes([algorithm])
        )
    listed = inner.table("quantized_layers")
    if listed is None:
        inner.refuse("quantized_layers", "missing, but quant_algo is MIXED_PRECISION")
    named: dict[str, list[str]] = {}
    for name in listed.values:
        entry = listed.table(name)
        if entry is not None and entry.raw("quant_algo") is not None:
            named.setdefault(_algorithm(entry), []).append(name)
    rules = (Rule(dtype, wildcards(names), lacks, head=True) for dtype, names in named.items())
    algorithms = [entry.get("quant_algo") for entry in listed.values.values() if isinstance(entry, dict)]
    return Quantisation(inner, tuple(rules), cache, _notes(algorithms))


# Four-bit weights that meet inputs of eight bits, and the rate that their products are counted at.
_FOUR_BY_EIGHT = {"W4A8_AWQ": "bf16", "W4A8_MXFP4_FP8": "fp4"}


def _notes(algorithms: Iterable[Any]) -> tuple[str, ...]:
    found = [algorithm for algorithm in _FOUR_BY_EIGHT if algorithm in algorithms]
    return tuple(f"products of {a} run in fp8, and are counted at the rate of {_FOUR_BY_EIGHT[a]}" for a in found)


def _algorithm(keys: Keys) -> str:
    """Return the format of one of ModelOpt's algorithms."""
    algorithm = keys.raw("quant_algo")
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ"):
        return _integer_format(keys, 4, _group(keys), zeros=False, key="group_size")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        keys.refuse("quant_algo", f"{shown(algorithm)} is not modelled; modelled: {', '.join(_ALGORITHMS)}, W4A16_AWQ")
    return _ALGORITHMS[algorithm]


_METHODS: dict[str, Callable[[Keys], Quantisation]] = {
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
}
