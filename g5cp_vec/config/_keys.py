"""Every key a point may have: how its value is read, which values it may take, and its default.

The order here is the order of the key columns in results. A reader returns the value in its final form, or raises
``ValueError`` with what was expected and what was found.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from g5cp_vec.config._files import describe, did_you_mean, unknown_key
from g5cp_vec.config.collectives import BEST, COLLECTIVES
from g5cp_vec.config.context import ALLGATHER_KV, ALLGATHER_Q, DCP_FORMS, DISPATCHES, SEMANTICS
from g5cp_vec.config.dtypes import BLOCK_FORMATS, DTYPE_BITS

RANK_ORDER = ("tp", "cp", "pp", "dp")
PREFILL_FORM = "pass_kv"
DECODE_FORM = "pass_q"
PASS_Q_RING = "pass_q_ring"

# Names of the published ways to distribute attention.
_PREFILL_FORMS = (PREFILL_FORM, ALLGATHER_KV, ALLGATHER_Q)
_DECODE_FORMS = (DECODE_FORM, PASS_Q_RING, *DCP_FORMS)

# Bounds far beyond any deployment, low enough that products of three stay inside int64.
_MAX_COUNT = 2**20
_MAX_TOKENS = 2**40
_MAX_STEPS = 100_000

_TOKENS = re.compile(r"([0-9]{1,15})([km]?)", re.IGNORECASE)
_TOKEN_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def expected(what: str, value: object) -> ValueError:
    """Return the complaint that `value` is not `what`."""
    return ValueError(f"expected {what}, got {describe(value)}")


@dataclass(frozen=True)
class Key:
    """One key of a point.

    Attributes
    ----------
    read : callable
        From what the user wrote to the value.
    default : object
        Value where the key is not written; None means "derived from the rest of the point".
    required : bool
        Whether the key has no default at all.
    least : int or None
        Smallest legal value of an integer key, None for other keys; only integer keys may be ranges.
    """

    read: Callable[[Any], Any]
    default: Any = None
    required: bool = False
    least: int | None = None


def _text(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise expected("a preset name or a path", value)


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise expected("true or false", value)


def _one_of(*choices: str) -> Callable[[Any], str]:
    listed = f"one of {', '.join(choices)}"

    def read(value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise ValueError(f"{expected(listed, value)}{hint}")

    return read


def _integer(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= value <= most:
            return int(value)
        raise expected(f"an integer from {least} to {most}", value)

    return read


def _dp(value: Any) -> int | str:
    if value == "auto":
        return "auto"
    try:
        return _integer(1, _MAX_COUNT)(value)
    except ValueError:
        raise expected(f'"auto" or an integer from 1 to {_MAX_COUNT}', value) from None


def _tokens(least: int) -> Callable[[Any], int]:
    """Return a reader of token counts: 131072, "131072", "128K"; K = 1024, M = 1024 * 1024."""
    what = f'a number of tokens from {least} to {_MAX_TOKENS}, like 4096, "128K" or "1M"'

    def read(value: Any) -> int:
        match = _TOKENS.fullmatch(value.strip()) if isinstance(value, str) else None
        tokens = int(match[1]) * _TOKEN_UNITS[match[2].lower()] if match else value
        try:
            return _integer(least, _MAX_TOKENS)(tokens)
        except ValueError:
            raise expected(what, value) from None

    return read


def _form(phase: str, forms: Sequence[str], other: Sequence[str]) -> Callable[[Any], str]:
    """Return a reader of attention forms that knows the other phase's forms for what they are."""
    other_phase = "decode" if phase == "prefill" else "prefill"
    listed = " or ".join(map(repr, forms))

    def read(value: Any) -> str:
        if isinstance(value, str) and value in forms:
            return value
        if isinstance(value, str) and value in other:
            raise ValueError(f"{value!r} is a {other_phase} form; {phase} distributes attention with {listed}")
        raise expected(listed, value)

    return read


def _rank_order(value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and sorted(map(str, value)) == sorted(RANK_ORDER):
        return tuple(map(str, value))
    raise expected(f"a list with each of {', '.join(RANK_ORDER)} once, fastest first", value)


def _count(*, required: bool = False, default: int | None = None) -> Key:
    return Key(_integer(1, _MAX_COUNT), default=default, required=required, least=1)


_DTYPE = _one_of(*DTYPE_BITS)
_WEIGHT_DTYPE = _one_of(*DTYPE_BITS, *BLOCK_FORMATS)

KEYS: dict[str, Key] = {
    "phase": Key(_one_of("prefill", "decode"), required=True),
    "path": Key(_one_of("g5", "math"), default="g5"),
    "model": Key(_text, required=True),
    "chip": Key(_text, required=True),
    "topology": Key(_text, required=True),
    "runtime": Key(_text),
    "n_chips": _count(required=True),
    "dp": Key(_dp, default="auto", least=1),
    "tp": _count(default=1),
    "pp": _count(default=1),
    "cp": _count(required=True),
    "pcp": _count(default=1),
    "dcp": _count(default=1),
    "cp_semantics": Key(_one_of(*SEMANTICS), default=SEMANTICS[0]),
    "interleave": _count(),
    "block_size": _count(),
    "ep": _count(default=1),
    "moe_dispatch": Key(_one_of(*DISPATCHES)),
    "seq_len": Key(_tokens(1), required=True, least=1),
    "batch": _count(default=1),
    "cached_tokens": Key(_tokens(0), default=0, least=0),
    "chunk_tokens": Key(_tokens(0), default=0, least=0),
    "max_num_batched_tokens": Key(_tokens(1), least=1),
    "max_num_seqs": _count(),
    "max_model_len": Key(_tokens(1), least=1),
    "prefill_form": Key(_form("prefill", _PREFILL_FORMS, _DECODE_FORMS)),
    "decode_form": Key(_form("decode", _DECODE_FORMS, _PREFILL_FORMS)),
    "collective": Key(_one_of(*COLLECTIVES, BEST), default="ring"),
    "tp_sp": Key(_flag, default=False),
    "rank_order": Key(_rank_order, default=RANK_ORDER),
    "dtype": Key(_WEIGHT_DTYPE),
    "ffn_dtype": Key(_WEIGHT_DTYPE),
    "kv_dtype": Key(_DTYPE),
    "activation_dtype": Key(_DTYPE, default="bf16"),
}

# What a row carries beside its deployment: these change costs only, never which operations there are.
LOAD_KEYS = ("seq_len", "batch", "cached_tokens", "chunk_tokens")
DEPLOYMENT_KEYS = tuple(name for name in KEYS if name not in LOAD_KEYS)


def read_range(key: Key, table: Mapping[str, Any]) -> list[int]:
    """Expand ``{from, to, steps, scale, multiple_of}`` into increasing integers, both ends included.

    Parameters
    ----------
    key : Key
        The integer key the range is for; reads the ends.
    table : mapping
        ``scale`` is ``"linear"`` (default) or ``"log"``; values are rounded to the nearest ``multiple_of`` (default 1),
        halves up, and never to 0 where 0 is not legal. Duplicates that rounding makes are dropped.

    Raises
    ------
    ValueError
        A wrong, unknown or missing entry.
    """
    known = ("from", "to", "steps", "scale", "multiple_of")
    for entry in table:
        if entry not in known:
            raise ValueError(unknown_key(str(entry), known))
    for entry in ("from", "to", "steps"):
        if entry not in table:
            raise ValueError(f"{entry}: missing, a range is {{from, to, steps, scale, multiple_of}}")

    def read(entry: str, reader: Callable[[Any], Any], default: Any = None) -> Any:
        try:
            return reader(table.get(entry, default))
        except ValueError as error:
            raise ValueError(f"{entry}: {error}") from None

    first, last = read("from", key.read), read("to", key.read)
    steps = read("steps", _integer(1, _MAX_STEPS))
    scale = read("scale", _one_of("linear", "log"), "linear")
    multiple_of = read("multiple_of", _tokens(1), 1)
    if isinstance(first, str) or isinstance(last, str):
        raise ValueError("the ends of a range are integers")
    if first > last or (steps == 1 and first != last):
        raise ValueError(f"from = {first}, to = {last}, steps = {steps}: expected from < to and at least 2 steps")
    if scale == "log" and first == 0:
        raise ValueError("from: expected an integer > 0 on a log scale, got 0")

    lowest = multiple_of if key.least else 0
    values: dict[int, None] = {}
    for step in range(steps):
        if scale == "log" and 0 < step < steps - 1:
            multiples = math.floor(first * (last / first) ** (step / (steps - 1)) / multiple_of + 0.5)
        else:  # in integers, so that the ends are met whatever a power rounds to
            intervals = max(1, steps - 1)
            numerator, denominator = first * intervals + (last - first) * step, multiple_of * intervals
            multiples = (2 * numerator + denominator) // (2 * denominator)
        values[max(lowest, multiple_of * multiples)] = None
    return list(values)
