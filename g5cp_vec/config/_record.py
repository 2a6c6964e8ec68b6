"""The base of everything read from a file: frozen, hashable, strict about types, deaf to unknown keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# Counts meet others in 64 bits; what is listed one by one, like layers, there are few of.
MOST = 10**18
Count = Annotated[int, Field(gt=0, le=MOST)]
Size = Annotated[int, Field(ge=0, le=MOST)]
Few = Annotated[int, Field(gt=0, le=2**16)]
# Bytes of a memory: compared with counts in 64 bits, and far beyond any machine.
Capacity = Annotated[int, Field(gt=0, le=MOST)]
# Such that products and quotients of several quantities stay far from the ends of float64.
_LEAST_QUANTITY, _MOST_QUANTITY = 1e-30, 1e30


def within_reach(value: float) -> float:
    """Return a quantity in SI units that others may be multiplied and divided by."""
    if value and not _LEAST_QUANTITY <= abs(value) <= _MOST_QUANTITY:
        limits = f"{_LEAST_QUANTITY:g} to {_MOST_QUANTITY:g}"
        raise ValueError(f"expected a quantity that is within {limits} in SI units, got {value!r}")
    return value


_Tame = AfterValidator(within_reach)
Positive = Annotated[float, Field(gt=0), _Tame]
NonNegative = Annotated[float, Field(ge=0), _Tame]
Fraction = Annotated[float, Field(gt=0, le=1), _Tame]


def sha256_of_json(contents: Mapping[str, object]) -> str:
    """Return the hex SHA-256 of the canonical JSON text (sorted keys, no spaces) of `contents`."""
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Frozen(BaseModel):
    """A value object: immutable, hashable, no silent conversion (``true`` is no integer, ``"8"`` is no number)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a checked copy with some fields replaced.

        The inherited method checks nothing and carries cached properties over, which then describe the original.
        """
        schema = type(self).model_fields
        fields = {name: getattr(self, name) for name in schema} | dict(update or {})
        aliases = {name: field.alias or name for name, field in schema.items()}
        return type(self).model_validate({aliases.get(name, name): value for name, value in fields.items()})


class Record(Frozen):
    """A named file of the user's, or a preset.

    Attributes
    ----------
    name : str
        As written in the file; the file's stem where it is not.
    """

    name: Annotated[str, Field(min_length=1)]

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the contents that matter to a simulation.

        Where a number came from does not; a runtime named by a chip or topology is counted where it is used.
        """
        return sha256_of_json(self.model_dump(mode="json", exclude={"name", "source", "runtime", "notes"}))
