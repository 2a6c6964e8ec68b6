"""The one seam between the units of the field that files use and the SI units of everything else.

A key says its unit by its suffix: ``latency_us`` in a file is ``latency_s`` in an object. The conversion is by suffix,
so that a new parameter needs no new code, and it is reversible, so that a complaint names the key as it was written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# (suffix in files, suffix in objects, files' units per SI unit as numerator / denominator).
# A quotient, because 2 / 1e6 is the float nearest to 2 µs and 2 * 1e-6 need not be.
_SUFFIXES = (
    ("_gbytes_per_s", "_bytes_per_s", 1e9, 1.0),
    ("_gbytes", "_bytes", 1e9, 1.0),
    ("_tflops", "_flops", 1e12, 1.0),
    ("_us", "_s", 1.0, 1e6),
)


def written_key(name: str) -> str:
    """Return the file's spelling of an object's attribute: ``latency_s`` -> ``latency_us``."""
    if name.endswith(tuple(field_suffix for field_suffix, *_ in _SUFFIXES)):
        return name  # "_gbytes_per_s" ends in "_s" too
    for field_suffix, si_suffix, _, _ in _SUFFIXES:
        if name.endswith(si_suffix):
            return name.removesuffix(si_suffix) + field_suffix
    return name


def written_quantity(name: str, value: float) -> float:
    """Return a quantity in SI units as its key's unit in a file counts it: 2e-6 of ``latency_s`` -> 2.0."""
    if not name.endswith(tuple(field_suffix for field_suffix, *_ in _SUFFIXES)):
        for _, si_suffix, numerator, denominator in _SUFFIXES:
            if name.endswith(si_suffix):
                return value * denominator / numerator
    return value


def _scaled(value: Any, key: str, numerator: float, denominator: float) -> Any:
    """Scale a number, or a table or list of numbers; anything else is left for the schema to refuse."""
    if isinstance(value, Mapping):
        return {name: _scaled(entry, key, numerator, denominator) for name, entry in value.items()}
    if isinstance(value, list):
        return [_scaled(entry, key, numerator, denominator) for entry in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        quantity = value * numerator / denominator
    except OverflowError:  # an integer beyond float64
        return math.inf
    # Whole bytes: 85.89934592 GB is meant to be exactly 80 GiB.
    return round(quantity) if key.endswith("_gbytes") and math.isfinite(quantity) else quantity


def to_si(table: Mapping[str, Any]) -> dict[str, Any]:
    """Rename and convert every key with a field unit, in nested tables and lists of them too; the rest is unchanged."""
    converted: dict[str, Any] = {}
    for key, value in table.items():
        for field_suffix, si_suffix, numerator, denominator in _SUFFIXES:
            if key.endswith(field_suffix):
                name = key.removesuffix(field_suffix) + si_suffix
                converted[name] = _scaled(value, key, numerator, denominator)
                break
        else:
            converted[key] = _nested_to_si(value)
    return converted


def _nested_to_si(value: Any) -> Any:
    if isinstance(value, Mapping):
        return to_si(value)
    return [_nested_to_si(entry) for entry in value] if isinstance(value, list) else value
