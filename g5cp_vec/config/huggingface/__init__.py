"""A Hugging Face ``config.json`` as a model.

``source`` reads the file and its keys, ``nesting`` finds the language model in it, ``families`` says by which function
of ``builders`` and ``hybrids`` (with the pieces of ``blocks``) its layers come from the keys, ``quantisation`` which
element types the checkpoint stores (``modules`` has the names that it speaks of). The result is the table that a TOML
file would hold; :mod:`g5cp_vec.config.model` checks it as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from g5cp_vec.config._text import in_unicode
from g5cp_vec.config.huggingface.nesting import TextPart, prediction_note, refuse_what_was_not_read, text_part
from g5cp_vec.config.huggingface.quantisation import read_quantisation
from g5cp_vec.config.huggingface.source import FILE, Keys, config_path, read_json, shown

__all__ = ["is_huggingface", "read_huggingface"]

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"}


def is_huggingface(path: Path) -> bool:
    """Whether a path is read here: a JSON file, or the folder of a checkpoint."""
    return path.suffix == ".json" or path.is_dir()


def read_huggingface(path: Path) -> tuple[Path, dict[str, Any]]:
    """Read a ``config.json``, or the one in a folder.

    Returns
    -------
    path : Path
        The file that was read.
    table : dict
        The contents of a TOML file that means the same model; ``notes`` say what was left out or assumed.

    Raises
    ------
    ConfigError
        One line with file and key: not the file of a model, a value that cannot be, a thing that is not modelled.
    """
    path = config_path(path)
    part = text_part(path, read_json(path))
    table = part.family.build(part.keys)
    layers = table.pop("layer")
    model = {
        "name": in_unicode(path.resolve().parent.name if path.name == FILE else path.stem),
        "hidden": part.keys.count("hidden_size"),
        "vocab": table.pop("vocab", None) or part.keys.count("vocab_size"),
        "n_layers": len(layers),
        "tie_embeddings": _tied(part),
        **table,
    }
    types, notes = _element_types(part, layers, tied=model["tie_embeddings"])
    refuse_what_was_not_read(part)
    notes = [*part.notes, *prediction_note(part), *_assumed(part), *notes]
    return path, {**model, **types, "layer": _runs(layers), "notes": notes, "source": f"{FILE} of {part.family.config}"}


def _tied(part: TextPart) -> bool:
    """Return whether the head is the embedding table: as the text part says, else the whole model, else the class."""
    if part.keys.says("tie_word_embeddings") or not part.whole.says("tie_word_embeddings"):
        return part.keys.flag("tie_word_embeddings")
    return part.whole.flag("tie_word_embeddings")


def _assumed(part: TextPart) -> list[str]:
    """Return a note on the keys that the file leaves to its configuration class."""
    entries = [f"{key} = {shown(value)}" for key, value in part.keys.assumed.items() if key != "qk_norm"]
    return [f"absent keys are as in {part.family.config}: {', '.join(entries)}"] if entries else []


def _runs(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tables of layers, equal ones in a row as one."""
    return [{**table, "repeat": len(list(equal))} for table, equal in groupby(layers)]


def _element_types(part: TextPart, layers: list[dict[str, Any]], *, tied: bool) -> tuple[dict[str, Any], list[str]]:
    """Return ``dtype`` and ``dtypes`` of the model, and notes; layers that differ get ``dtypes`` of their own."""
    quantised = _quantisation_keys(part)
    base, notes = _base_dtype(part, quantised is not None)
    stored = {"embedding": base, "head": base} if base != "bf16" else {}
    if quantised is None:
        return {"dtype": base, **({"dtypes": stored} if stored else {})}, notes
    quantisation = read_quantisation(quantised)
    found, own = quantisation.dtypes(part.family.names, layers, base)
    if not tied and (head := quantisation.head(base)) != base:
        found["head"] = head
    if quantisation.kv is not None:
        found["kv"] = quantisation.kv
    notes += quantisation.notes
    notes.append(f"stored as {', '.join(f'{name} {dtype}' for name, dtype in found.items())}; everything else {base}")
    for i, types in enumerate(own):
        if types:
            layers[i] = layers[i] | {"dtypes": types}
    if n := sum(map(bool, own)):
        first = next(i for i, types in enumerate(own) if types)
        said = ", ".join(f"{name} {dtype}" for name, dtype in own[first].items())
        notes.append(f"{n} of {len(layers)} layers are stored otherwise, as layer {first}: {said}")
    if found.get("attention", base) != base and any("gated_delta_net" in str(layer.get("linear")) for layer in layers):
        notes.append(f"projections to decay and rate of linear layers are counted in {found['attention']} too")
    return {"dtype": base, "dtypes": {**stored, **found}}, notes


def _quantisation_keys(part: TextPart) -> Keys | None:
    """Return where the quantisation is said: in the file, or in ``hf_quant_config.json`` beside it.

    What a text part says is of the checkpoint that the other file was made from, where there is one.
    """
    if (table := part.whole.table("quantization_config")) is not None:
        return table
    beside = part.whole.path.with_name(part.whole.path.name.removesuffix(FILE) + f"hf_quant_{FILE}")
    if part.whole.path.name.endswith(FILE) and beside.is_file():
        return Keys(beside, read_json(beside))
    return part.keys.table("quantization_config")


def _base_dtype(part: TextPart, quantised: bool) -> tuple[str, list[str]]:
    """Return the type of whatever is not quantised."""
    for keys in (part.keys, part.whole):
        if keys.says("dtype"):
            said = keys.text("dtype").removeprefix("torch.")
            if said in _DTYPES:
                return _DTYPES[said], []
            if not (quantised and said.startswith("float8")):
                keys.wrong("dtype", f"one of {', '.join(_DTYPES)}")
    return "bf16", ["the file does not say the type of weights that are not quantised: bf16 is taken"]
