"""One accelerator: memory, bandwidth, peak rates, and how much of them real kernels reach."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, field_serializer, field_validator, model_validator

from g5cp_vec.config._files import PRESETS, anchored_runtime, describe, locate, read_record
from g5cp_vec.config._record import Capacity, Fraction, Frozen, Positive, Record
from g5cp_vec.config._yaml import is_yaml
from g5cp_vec.config.calibration import Calibration
from g5cp_vec.config.dtypes import Dtype
from g5cp_vec.config.grouped_chip import read_grouped_chip

_PEAKS = TypeAdapter(dict[Dtype, Positive], config=ConfigDict(strict=True, allow_inf_nan=False))


def _pairs(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(tuple(pair) if isinstance(pair, list) else pair for pair in value)
    raise ValueError(f"expected a list of pairs, got {describe(value)}")


class Efficiency(Frozen):
    """Fraction of a peak that an operation reaches.

    The defaults are assumptions of this package, round numbers in the range that large kernels reach on current
    accelerators. They are calibrated against nothing, and a result that rests on them says ``calibrated = false``.
    Other values name their source.

    Attributes
    ----------
    gemm, attention : float
        Of the peak rate of the element type (0-1].
    memory : float
        Of the memory bandwidth (0-1].
    attention_by_query_tokens : tuple of (float, float)
        What prefill attention reaches by the number of query tokens of a sequence that a kernel computes, in place of
        ``attention``: increasing pairs, linear in the logarithm between them and constant beyond.
    source : str or None
        What the numbers were fitted to; None for assumptions.
    """

    gemm: Fraction = 0.70
    attention: Fraction = 0.60
    memory: Fraction = 0.80
    attention_by_query_tokens: Annotated[tuple[tuple[Positive, Fraction], ...], BeforeValidator(_pairs)] = ()
    source: str | None = None

    @field_validator("attention_by_query_tokens")
    @classmethod
    def _queries_increase(cls, pairs: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        queries = [query for query, _ in pairs]
        if queries != sorted(set(queries)):
            raise ValueError(f"expected increasing query tokens, got {describe(queries)}")
        return pairs

    def prefill_attention(self, query_tokens: Any) -> Any:
        """Return what attention of so many query tokens per sequence reaches (number or array)."""
        if not self.attention_by_query_tokens:
            return self.attention
        queries, fractions = zip(*self.attention_by_query_tokens, strict=True)
        return np.interp(np.log(np.asarray(query_tokens, float)), np.log(queries), fractions)


class Chip(Record):
    """One accelerator.

    Attributes
    ----------
    hbm_bytes : int
        Memory (bytes).
    hbm_bandwidth_bytes_per_s : float
        Memory bandwidth (bytes/s).
    usable_memory_fraction : float
        Share of the memory that weights, cache and activations may fill; the rest is the runtime's.
    peak_flops : tuple of (str, float)
        Dense peak rate (flop/s) by element type, sorted by type; a mapping is accepted and frozen.
    efficiency : Efficiency
    calibration : Calibration or None
        Measured durations of kernels; `efficiency` prices what it lacks.
    runtime : str or None
        Runtime to assume where neither the grid nor the topology names one.
    """

    hbm_bytes: Capacity
    hbm_bandwidth_bytes_per_s: Positive
    usable_memory_fraction: Fraction = 0.9
    peak_flops: tuple[tuple[Dtype, Positive], ...]
    efficiency: Efficiency = Efficiency()
    runtime: str | None = None
    calibration: Calibration | None = None

    @property
    def calibrated(self) -> bool:
        """Whether kernels of this chip were measured, or its efficiencies fitted to measurements."""
        return self.calibration is not None or self.efficiency.source is not None

    @field_serializer("calibration", when_used="json")
    def _digest_calibration(self, value: Calibration | None) -> str | None:
        """Thousands of numbers are named by their hash, in manifests and fingerprints."""
        return None if value is None else value.fingerprint

    @field_validator("peak_flops", mode="before")
    @classmethod
    def _freeze_peaks(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return tuple(sorted(_PEAKS.validate_python(dict(value)).items()))
        if isinstance(value, tuple):
            return value
        raise ValueError(f"expected a table of rates by element type, got {describe(value)}")

    @model_validator(mode="after")
    def _bf16_is_known(self) -> Self:
        if "bf16" not in self._peaks:
            raise ValueError("peak_tflops.bf16: missing, every other type without a rate of its own falls back to it")
        return self

    @cached_property
    def _peaks(self) -> dict[str, float]:
        return dict(self.peak_flops)

    def peak(self, dtype: str) -> float:
        """Return the dense peak rate (flop/s) for `dtype`; a type the chip has no unit for runs at the bf16 rate."""
        return self._peaks.get(dtype, self._peaks["bf16"])


def load_chip(name_or_path: str, base: Path | None = None) -> Chip:
    """Return a chip by preset name or path, of TOML or of grouped YAML that describes one kind of chip.

    See :func:`g5cp_vec.config.model.load_model`, and `g5cp_vec.config.grouped_chip` for the YAML.
    """
    path = locate("chips", name_or_path, base)
    if path.is_relative_to(PRESETS):
        return _load_preset(path)
    return _load(path)


def _load(path: Path) -> Chip:
    if is_yaml(path):
        return Chip.model_validate(read_grouped_chip(path))
    chip = read_record(Chip, path)
    return chip.model_copy(update={"runtime": anchored_runtime(chip.runtime, path)})


# A calibration is thousands of numbers, and presets do not change under a process.
_load_preset = cache(_load)
