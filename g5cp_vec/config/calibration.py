"""What was measured of a chip's kernels, as a chip file's ``[calibration]`` holds it.

A *surface* is the duration of one kind of kernel of one library over the sizes of its shape: a table of times at the
nodes of a grid, and a closed form that carries them beyond the grid (:mod:`g5cp_vec.cost.calibration` reads it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from g5cp_vec.config._files import describe
from g5cp_vec.config._record import Fraction, Frozen, NonNegative, Positive, Size, sha256_of_json
from g5cp_vec.config.dtypes import Dtype

Axes = tuple[tuple[str, tuple[float, ...]], ...]

# Axes of every kind of surface, in the order of the nodes, and the numbers its closed form needs besides.
AXES: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "attention_prefill": ("length", "heads"),
    "mla_prefill": ("length", "heads"),
    "mla_module": ("length", "heads"),
    "attention_decode": ("length", "kv_heads"),
    "mla_decode": ("length", "batch", "heads"),
    "moe": ("rows_per_expert", "experts", "width"),
    "dsa_module": ("new_tokens", "context"),
    "collective": ("message", "group"),
}
CONSTANTS: dict[str, tuple[str, ...]] = {
    "gemm": ("element_bits",),
    "attention_prefill": ("d_qk", "d_v", "kv_heads_per_head"),
    "mla_prefill": ("d_qk", "d_v", "kv_heads_per_head"),
    "mla_module": (),
    "attention_decode": ("d_qk", "d_v", "heads_per_kv_head", "element_bits"),
    "mla_decode": ("d_qk", "d_v", "element_bits"),
    "moe": ("hidden", "element_bits"),
    "dsa_module": ("heads", "has_indexer"),
    "collective": ("link_gigabytes_per_second", "copies"),
}
KINDS = tuple(AXES)


class Kernels(NamedTuple):
    """Which of several measured kernels count.

    Attributes
    ----------
    library : str
        Whose are preferred; "" for the chip's defaults.
    routing : str
        Distribution of tokens over experts, as a label of the tables; "" for an even one.
    """

    library: str = ""
    routing: str = ""


def _pairs(value: Any, what: str) -> Any:
    """Return a table as a tuple of pairs; lists inside become tuples."""
    if isinstance(value, Mapping):
        return tuple((key, tuple(entry) if isinstance(entry, list) else entry) for key, entry in value.items())
    if isinstance(value, tuple):
        return value
    raise ValueError(f"expected a table of {what}, got {describe(value)}")


class Surface(Frozen):
    """Durations of one kind of kernel.

    Attributes
    ----------
    kind : str
        A key of ``AXES``.
    library : str
        Whose kernel ran: framework, version, the table's own label.
    labels : tuple of (str, str)
        What else distinguishes rows of the table: element types, routing, operation.
    arithmetic_dtype : str
        Element type that the kernel multiplies in; its peak bounds the duration from below.
    default_for : str
        Element type for which a simulation takes this surface; empty where it takes another.
    constants : tuple of (str, float)
        See ``CONSTANTS``.
    axes : tuple of (str, tuple of float)
        Nodes of each axis, rising.
    duration_s : tuple of float
        Duration at each node, last axis fastest (s).
    overhead_s, arithmetic_efficiency, memory_efficiency : float
        Of the closed form beyond the nodes.
    n_rows : int
        Measured rows of this very chip and library behind it.
    median_error, p90_error : float or None
        Relative error on rows held out of the fit (cross-validation); None with too few rows.
    """

    kind: Literal[KINDS]  # type: ignore[valid-type]
    library: Annotated[str, Field(min_length=1)]
    labels: tuple[tuple[str, str], ...] = ()
    arithmetic_dtype: Dtype
    default_for: Dtype | Literal[""] = ""
    constants: tuple[tuple[str, NonNegative], ...]
    axes: Axes
    duration_s: tuple[Positive, ...]
    overhead_s: NonNegative
    arithmetic_efficiency: Positive
    memory_efficiency: Positive
    n_rows: Size
    median_error: NonNegative | None = None
    p90_error: NonNegative | None = None

    @field_validator("labels", mode="before")
    @classmethod
    def _freeze_labels(cls, value: Any) -> Any:
        return _pairs(value, "labels")

    @field_validator("constants", mode="before")
    @classmethod
    def _freeze_constants(cls, value: Any) -> Any:
        return _pairs(value, "numbers")

    @field_validator("axes", mode="before")
    @classmethod
    def _freeze_axes(cls, value: Any) -> Any:
        return _pairs(value, "lists of nodes")

    @field_validator("duration_s", mode="before")
    @classmethod
    def _freeze_durations(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        for what, given, needed in (
            ("axes", self.axes, AXES[self.kind]),
            ("constants", self.constants, CONSTANTS[self.kind]),
        ):
            if tuple(name for name, _ in given) != needed:
                found, expected = (", ".join(names) or "none" for names in ([name for name, _ in given], needed))
                raise ValueError(f"{what} of a {self.kind} surface: expected {expected}, got {found}")
        for name, nodes in self.axes:
            if not nodes or nodes[0] <= 0 or any(a >= b for a, b in zip(nodes, nodes[1:], strict=False)):
                raise ValueError(f"axes.{name}: expected numbers > 0, rising")
        n_nodes = math.prod(len(nodes) for _, nodes in self.axes)
        if len(self.duration_s) != n_nodes:
            raise ValueError(f"duration_us: expected one for each of {n_nodes} nodes, got {len(self.duration_s)}")
        return self

    @property
    def variant(self) -> tuple[Any, ...]:
        """What tells this surface from the others of a chip."""
        return self.kind, self.library, self.labels, self.constants

    @property
    def default_type(self) -> str:
        """Element type that a simulation may ask this surface for, empty where it asks none; see ``default_for``.

        Decode attention is asked for by the type of the cache, anything else by the type it multiplies in; whole
        modules and collectives are not asked for by type.
        """
        if self.kind in ("attention_decode", "mla_decode"):
            return dict(self.labels).get("kv_cache_dtype", "")
        return self.arithmetic_dtype if self.kind in ("gemm", "attention_prefill", "mla_prefill", "moe") else ""

    @property
    def routing(self) -> str:
        """Distribution of tokens over experts, empty where it is even or there are none."""
        distribution = dict(self.labels).get("distribution", "")
        return "" if distribution == "balanced" else distribution

    def is_of(self, library: str) -> bool:
        """Whether a library's kernel ran, whatever its version: "nccl" names "nccl-2.29.2"."""
        return self.library.replace("-", " ").split()[0].lower() == library.lower()

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The constants by name."""
        return dict(self.constants)

    @cached_property
    def log_nodes(self) -> tuple[NDArray[np.float64], ...]:
        """Binary logarithm of each axis' nodes."""
        return tuple(np.log2(np.array(nodes, float)) for _, nodes in self.axes)

    @cached_property
    def limits(self) -> tuple[tuple[float, float], ...]:
        """Smallest and largest node of each axis."""
        return tuple((nodes[0], nodes[-1]) for _, nodes in self.axes)

    @cached_property
    def log_duration(self) -> NDArray[np.float64]:
        """Natural logarithm of the nodes' durations (s), flat."""
        result: NDArray[np.float64] = np.log(np.array(self.duration_s))
        return result


class Calibration(Frozen):
    """Everything that was measured of a chip.

    Attributes
    ----------
    source : str
        Where the measurements are from, with their licence.
    fitted : str
        Date of the fit.
    tables : tuple of str
        Names of the files that were used.
    memory_efficiency : float or None
        Share of the memory bandwidth of element-wise work: what products with one row of input reach.
    surface : tuple of Surface
    """

    source: Annotated[str, Field(min_length=1)]
    fitted: str
    tables: tuple[str, ...]
    memory_efficiency: Fraction | None = None
    surface: tuple[Surface, ...]

    @field_validator("tables", "surface", mode="before")
    @classmethod
    def _freeze(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _one_default_each(self) -> Self:
        chosen = [(s.kind, s.default_for) for s in self.surface if s.default_for]
        for kind, dtype in chosen:
            if chosen.count((kind, dtype)) > 1:
                raise ValueError(f"surface: two of kind {kind} are default_for = {dtype!r}, expected one")
        return self

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the numbers, not of where they are from."""
        return sha256_of_json(self.model_dump(mode="json", exclude={"source", "fitted", "tables"}))

    @cached_property
    def defaults(self) -> dict[tuple[str, str], Surface]:
        """The surface that a simulation takes, by kind and element type."""
        return {(s.kind, s.default_for): s for s in self.surface if s.default_for}

    def collective(self, library: str, op: str) -> Surface | None:
        """Return what was measured of an operation of a collective library; the first word of its name tells it."""
        for surface in self.surface:
            if surface.kind == "collective" and dict(surface.labels).get("op") == op and surface.is_of(library):
                return surface
        return None

    def chosen(self, kernels: Kernels) -> dict[tuple[str, str], Surface]:
        """Return the surfaces that a simulation takes, by kind and element type.

        The defaults, but experts under another routing where it was measured, and what was measured of the library;
        the fastest of several.
        """
        if kernels not in self._chosen:
            taken = dict(self.defaults)
            found = [
                s
                for s in self.surface
                if s.default_type
                and (s.is_of(kernels.library) or (s.kind == "moe" and kernels.routing))
                and (s.kind != "moe" or s.routing == kernels.routing)
            ]
            # What is preferred most comes last and stays.
            found.sort(key=lambda s: (s.is_of(kernels.library), -float(s.log_duration.mean())))
            taken |= {(s.kind, s.default_type): s for s in found}
            self._chosen[kernels] = taken
        return self._chosen[kernels]

    @cached_property
    def _chosen(self) -> dict[Kernels, dict[tuple[str, str], Surface]]:
        return {Kernels(): self.defaults}
