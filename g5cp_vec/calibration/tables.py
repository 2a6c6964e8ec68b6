"""Measured kernels from CSV files: which kind a table is, what its columns mean, and what is wrong with it.

A table is recognised by its columns (``RECIPES``). Every row needs those of its kind and one time, ``latency_ms`` or
``latency_us``; ``system`` names the chip it ran on, ``backend``, ``backend_version``, ``kernel`` or ``library`` whose
kernel it was. Other columns are ignored.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.config._files import describe, did_you_mean
from g5cp_vec.config._text import MOST_TABLE_BYTES, in_unicode, read_text
from g5cp_vec.config.dtypes import DTYPE_BITS
from g5cp_vec.cost.calibration import constants_of
from g5cp_vec.errors import ConfigError

TIMES = {"latency_ms": 1e-3, "latency_us": 1e-6}
_LIBRARY = ("library", "backend", "backend_version", "kernel")
# Spellings of element types in tables: (name in labels, type the chip multiplies in, bits of an element).
_DTYPES = {
    "bfloat16": ("bf16", "bf16", 16),
    "bf16": ("bf16", "bf16", 16),
    "float16": ("fp16", "fp16", 16),
    "fp16": ("fp16", "fp16", 16),
    "fp8": ("fp8", "fp8", 8),
    "fp8_block": ("fp8_block", "fp8", 8),
    "int8": ("int8", "int8", 8),
    "nvfp4": ("nvfp4", "fp4", 4),
    "fp4": ("fp4", "fp4", 4),
}
# One way (GB/s) of NVLink generations 4, 5 and 3: the roof of a collective inside a node.
_LINKS = {"h100_sxm": 450.0, "h200_sxm": 450.0, "a100_sxm": 300.0}
_LINK_DEFAULT = 900.0


# Beyond any kernel, and such that products of a few stay finite.
_LEAST, _MOST = 1e-6, 1e15
MOST_ROWS = 200_000


class Row(NamedTuple):
    """One measured kernel.

    Attributes
    ----------
    kind : str
        Of the surface it belongs to.
    system : str
        As the table spells it, or "".
    backend, library : str
        The framework; framework, version and label together.
    labels, constants
        As of a surface.
    arithmetic_dtype, use : str
        Element type it multiplies in; the one a simulation asks for, "" where none does.
    place : tuple of float
        Coordinates on the axes of the surface.
    extra_bytes : float
        Element-wise traffic inside the measured time (experts' activation).
    seconds : float
    where : str
        File and line.
    """

    kind: str
    system: str
    backend: str
    library: str
    labels: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, float], ...]
    arithmetic_dtype: str
    use: str
    place: tuple[float, ...]
    extra_bytes: float
    seconds: float
    where: str

    @property
    def variant(self) -> tuple[Any, ...]:
        """What tells its surface from the others of a chip."""
        return self.kind, self.library, self.labels, self.constants


class _Meaning(NamedTuple):
    kind: str
    place: tuple[float, ...]
    constants: tuple[tuple[str, float], ...]
    labels: dict[str, str]
    arithmetic: str
    use: str
    extra_bytes: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """How the rows of one kind of table are read.

    Attributes
    ----------
    numbers : tuple of str
        Columns that must hold numbers > 0.
    dtypes : dict
        Columns of element types, with the value where a table lacks them; None where it may not.
    texts : dict
        Other labels, likewise.
    optional : dict
        Columns of numbers >= 0 with the value where a table lacks them.
    mean : callable
        (numbers by column, (label, arithmetic type, bits) by column, texts by column) -> _Meaning.
    """

    numbers: tuple[str, ...]
    dtypes: dict[str, str | None]
    texts: dict[str, str | None]
    optional: dict[str, float]
    mean: Callable[[Mapping[str, float], Mapping[str, tuple[str, str, int]], Mapping[str, str]], _Meaning]


def _multiplies_in(dtype: str, kv_dtype: str, texts: Mapping[str, str]) -> str:
    """Type that a prefill kernel multiplies in.

    TensorRT-LLM's kernels, and those that vLLM and SGLang take from it on Blackwell, beat the bf16 ones by 20 to 60 %
    with an fp8 cache whatever the attention's type: they are taken to multiply in fp8. FlashAttention 3 and FlashInfer
    show no such gain.
    """
    is_trtllm = "trtllm" in texts["backend"] or "trtllm" in texts["kernel"]
    return "fp8" if dtype == "fp8" or (kv_dtype == "fp8" and is_trtllm) else dtype


def _gemm(v: Mapping[str, float], d: Mapping[str, tuple[str, str, int]], t: Mapping[str, str]) -> _Meaning:
    label, arithmetic, bits = d["gemm_dtype"]
    constants = constants_of("gemm", element_bits=bits)
    return _Meaning("gemm", (v["m"], v["n"], v["k"]), constants, {"dtype": label}, arithmetic, arithmetic)


def _prefill(v: Mapping[str, float], d: Mapping[str, tuple[str, str, int]], t: Mapping[str, str]) -> _Meaning:
    attention, cache = d["attn_dtype"], d["kv_cache_dtype"]
    arithmetic = _multiplies_in(attention[1], cache[1], t)
    constants = constants_of(
        "attention_prefill",
        d_qk=v["head_dim"],
        d_v=v["head_dim"],
        kv_heads_per_head=0.125,
    )
    labels = {"attn_dtype": attention[0], "kv_cache_dtype": cache[0]}
    place = (v["seq_len"], v["batch_size"] * v["n_heads"])
    return _Meaning("attention_prefill", place, constants, labels, arithmetic, arithmetic)


def _mla_prefill(v: Mapping[str, float], d: Mapping[str, tuple[str, str, int]], t: Mapping[str, str]) -> _Meaning:
    attention, cache = d["mla_dtype"], d["kv_cache_dtype"]
    arithmetic = _multiplies_in(attention[1], cache[1], t)
    labels = {"mla_dtype": attention[0], "kv_cache_dtype": cache[0]}
    place = (v["seq_len"], v["batch_size"] * v["n_heads"])
    if t["scope"] == "mla_module_with_projections":
        labels["gemm_type"] = t["gemm_type"]
        # Projections may run in fp8: its peak is the only sure bound.
        bound = "fp8" if t["gemm_type"].startswith("fp8") else arithmetic
        return _Meaning("mla_module", place, (), labels, bound, "")
    if t["scope"] != "attention_kernel":
        raise ValueError(f"scope: expected attention_kernel or mla_module_with_projections, got {describe(t['scope'])}")
    constants = constants_of("mla_prefill", d_qk=192, d_v=128, kv_heads_per_head=1)
    return _Meaning("mla_prefill", place, constants, labels, arithmetic, arithmetic)


def _decode(v: Mapping[str, float], d: Mapping[str, tuple[str, str, int]], t: Mapping[str, str]) -> _Meaning:
    label, _, bits = d["kv_cache_dtype"]
    constants = constants_of(
        "attention_decode",
        d_qk=v["head_dim"],
        d_v=v["head_dim"],
        heads_per_kv_head=v["n_heads"] / v["n_kv_heads"],
        element_bits=bits,
    )
    place = (v["kv_len"], v["batch_size"] * v["n_kv_heads"])
    return _Meaning("attention_decode", place, constants, {"kv_cache_dtype": label}, label, label)


def _mla_decode(v: Mapping[str, float], d: Mapping[str, tuple[str, str, int]], t: Mapping[str, str]) -> _Meaning:
    attention, (label, kv_type, bits) = d["mla_dtype"], d["kv_cache_dtype"]
    arithmetic = _multiplies_in(attention[1], kv_type, t)
    constants = constants_of("mla_decode", d_qk=576, d_v=512, element_bits=bits)
    labels = {"mla_dtype": attention[0], "kv_cache_dtype": label}
    return _Meaning("mla_decode", (v["kv_len"], v["batch_size"], v["n_heads"]), constants, labels, arithmetic, kv_type)


def _moe(v: Mapping[str, float], d: Mapping[str, tuple[str, str, int]], t: Mapping[str, str]) -> _Meaning:
    if v["moe_ep_size"] != 1:
        raise ValueError("moe_ep_size: expected 1, tokens are counted differently with expert parallelism")
    label, arithmetic, bits = d["moe_dtype"]
    rows = v["num_tokens"] * v["topk"]
    experts = min(rows, v["num_experts"])
    width = v["inter_size"] / v["moe_tp_size"]
    # Activation between the products: reads gate and up, writes one, in bf16.
    extra = 3 * rows * width * DTYPE_BITS["bf16"] / 8
    # Routing in a simulation is uniform.
    use = arithmetic if t["distribution"] == "balanced" else ""
    constants = constants_of("moe", hidden=v["hidden_size"], element_bits=bits)
    labels = {"moe_dtype": label, "distribution": t["distribution"]}
    return _Meaning("moe", (rows / experts, experts, width), constants, labels, arithmetic, use, extra)


def _collective(v: Mapping[str, float], d: Mapping[str, tuple[str, str, int]], t: Mapping[str, str]) -> _Meaning:
    if v["num_gpus"] < 2:
        raise ValueError(f"num_gpus: expected 2 or more, got {v['num_gpus']:g}")
    operations = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
    if t["op"] not in operations:
        raise ValueError(f"op: expected one of {', '.join(operations)}, got {describe(t['op'])}")
    link = v["link_gbytes_per_s"] or _LINKS.get(t["system"], _LINK_DEFAULT)
    constants = constants_of("collective", link_gigabytes_per_second=link, copies=2 if t["op"] == "all_reduce" else 1)
    return _Meaning("collective", (v["bytes_total"], v["num_gpus"]), constants, {"op": t["op"]}, "bf16", "")


def _dsa(v: Mapping[str, float], d: Mapping[str, tuple[str, str, int]], t: Mapping[str, str]) -> _Meaning:
    has_indexer = "indexer" in t["kernel"] and "skip_indexer" not in t["kernel"]
    labels = {key: t[key] for key in ("phase", "model", "kv_cache_dtype", "gemm_type")}
    constants = constants_of("dsa_module", heads=v["n_heads"], has_indexer=has_indexer)
    place = (v["batch_size"] * v["new_tokens"], v["new_tokens"] + v["past_kv_len"])
    return _Meaning("dsa_module", place, constants, labels, "fp8", "")


# In the order in which they are tried: the first whose columns are all there.
RECIPES: dict[str, Recipe] = {
    "gemm": Recipe(("m", "n", "k"), {"gemm_dtype": None}, {}, {}, _gemm),
    "prefill attention": Recipe(
        ("seq_len", "n_heads", "n_kv_heads", "head_dim"),
        {"attn_dtype": "bf16", "kv_cache_dtype": "bf16"},
        {},
        {"batch_size": 1},
        _prefill,
    ),
    "MLA prefill": Recipe(
        ("seq_len", "n_heads"),
        {"mla_dtype": "bf16", "kv_cache_dtype": "bf16"},
        {"scope": "attention_kernel", "gemm_type": ""},
        {"batch_size": 1},
        _mla_prefill,
    ),
    "decode attention": Recipe(
        ("kv_len", "n_heads", "n_kv_heads", "head_dim"), {"kv_cache_dtype": "bf16"}, {}, {"batch_size": 1}, _decode
    ),
    "MLA decode": Recipe(
        ("kv_len", "n_heads"), {"mla_dtype": "bf16", "kv_cache_dtype": "bf16"}, {}, {"batch_size": 1}, _mla_decode
    ),
    "experts": Recipe(
        ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts"),
        {"moe_dtype": None},
        {"distribution": "balanced"},
        {"moe_tp_size": 1, "moe_ep_size": 1},
        _moe,
    ),
    "sparse attention module": Recipe(
        ("new_tokens", "n_heads"),
        {},
        {"phase": None, "model": None, "kv_cache_dtype": "bfloat16", "gemm_type": ""},
        {"batch_size": 1, "past_kv_len": 0},
        _dsa,
    ),
    "collective": Recipe(("num_gpus", "bytes_total"), {}, {"op": "all_reduce"}, {"link_gbytes_per_s": 0}, _collective),
}


def read_tables(paths: Sequence[str | Path], system: str = "") -> list[Row]:
    """Read measured rows.

    Parameters
    ----------
    paths : sequence of path
        CSV files with a header.
    system : str
        Where a table has no such column.

    Raises
    ------
    ConfigError
        A file cannot be read, is of no known kind, or holds a wrong value; one line each, at most 20.
    """
    rows: list[Row] = []
    for path in paths:
        rows += _read_table(Path(path), system)
    return rows


def _read_table(path: Path, system: str) -> list[Row]:
    text = read_text(path, "a CSV file", most_bytes=MOST_TABLE_BYTES, encoding="utf-8-sig")
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        header = [name.strip() for name in reader.fieldnames or []]
        reader.fieldnames = header
        records = [(reader.line_num, record) for record in reader]
    except csv.Error as error:
        raise ConfigError(f"{path}: not a CSV file: {' '.join(str(error).split())}") from None
    recipe = _recognise(path, header)
    if len(records) > MOST_ROWS:
        raise ConfigError(f"{path}: has {len(records)} rows, expected at most {MOST_ROWS}; keep a sample of them")
    if not records:
        raise ConfigError(f"{path}: no rows below the header")
    rows, lines = [], []
    for number, record in records:
        try:
            rows.append(_read_row(recipe, record, system, f"{in_unicode(str(path))}:{number}"))
        except ValueError as error:
            lines.append(f"{path}:{number}: {error}")
    if lines:
        raise ConfigError(lines[:20])
    return rows


def _recognise(path: Path, header: list[str]) -> Recipe:
    twice = {name for name in header if header.count(name) > 1}
    if twice:
        raise ConfigError(f"{path}: column {sorted(twice)[0]!r} stands twice")
    times = [name for name in TIMES if name in header]
    if len(times) != 1:
        found = " and ".join(times) or "neither"
        if len(header) == 1 and (sign := next((sign for sign in ";\t|" if sign in header[0]), None)):
            found = f"columns parted by {sign!r}; write commas"
        elif not times and (near := next((name for name in header if name.startswith(("latency", "time"))), None)):
            found = f"{near!r}; its unit belongs in the name"
        raise ConfigError(f"{path}: expected one column of times, {' or '.join(TIMES)}, got {found}")
    for recipe in RECIPES.values():
        needed = [*recipe.numbers, *(name for name, value in recipe.dtypes.items() if value is None)]
        needed += [name for name, value in recipe.texts.items() if value is None]
        if set(needed) <= set(header):
            return recipe
    nearest = max(RECIPES, key=lambda name: len(set(RECIPES[name].numbers) & set(header)) / len(RECIPES[name].numbers))
    recipe = RECIPES[nearest]
    needed = [*recipe.numbers, *(k for k, v in {**recipe.dtypes, **recipe.texts}.items() if v is None)]
    missing = [name for name in needed if name not in header]
    hint = did_you_mean(missing[0], header)
    raise ConfigError(f"{path}: no known kind of table; nearest is {nearest}, which lacks {', '.join(missing)}{hint}")


def _number(record: Mapping[str, str | None], name: str, *, least: float = 0.0, above: bool = True) -> float:
    text = record[name]
    try:
        value = float(text or "")
    except ValueError:
        value = np.nan
    if not (np.isfinite(value) and (value > least if above else value >= least)):
        raise ValueError(f"{name}: expected a number {'>' if above else '>='} {least:g}, got {describe(text or '')}")
    if value and not _LEAST <= value <= _MOST:
        raise ValueError(f"{name}: expected a number from {_LEAST:g} to {_MOST:g}, got {describe(text or '')}")
    return value


def _read_row(recipe: Recipe, record: Mapping[str, str | None], system: str, where: str) -> Row:
    if None in record or any(value is None for value in record.values()):
        raise ValueError("a row with more or fewer cells than the header")
    (time,) = (name for name in TIMES if name in record)
    numbers = {name: _number(record, name) for name in recipe.numbers}
    for name, default in recipe.optional.items():
        numbers[name] = _number(record, name, above=False) if record.get(name) else default
    dtypes = {name: _dtype(record.get(name) or default, name) for name, default in recipe.dtypes.items()}
    texts = {name: record.get(name) or default or "" for name, default in recipe.texts.items()}
    identity = {name: record.get(name) or "" for name in ("system", *_LIBRARY)}
    identity["system"] = identity["system"] or system
    meaning = recipe.mean(numbers, dtypes, {**identity, **texts})
    library = " ".join(identity[name] for name in _LIBRARY if identity[name])
    return Row(
        kind=meaning.kind,
        system=identity["system"],
        backend=identity["backend"] or identity["library"],
        library=library or "user",
        labels=tuple(meaning.labels.items()),
        constants=meaning.constants,
        arithmetic_dtype=meaning.arithmetic,
        use=meaning.use,
        place=meaning.place,
        extra_bytes=meaning.extra_bytes,
        seconds=_number(record, time) * TIMES[time],
        where=where,
    )


def _dtype(text: str | None, name: str) -> tuple[str, str, int]:
    if text not in _DTYPES:
        known = ", ".join(_DTYPES)
        hint = did_you_mean(text or "", _DTYPES)
        raise ValueError(f"{name}: expected one of {known}, got {describe(text or '')}{hint}")
    return _DTYPES[text]


def places(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Return the coordinates of rows of one kind, shape (n_rows, n_axes)."""
    return np.array([row.place for row in rows], float)
