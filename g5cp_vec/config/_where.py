"""The filter of a grid: an SQL expression over the keys, evaluated by polars."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl

from g5cp_vec.config._files import describe, unknown_key
from g5cp_vec.config._frame import written_frame
from g5cp_vec.config._keys import KEYS

if TYPE_CHECKING:
    from g5cp_vec.config.grid import Grid

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_SLIPS = re.compile(r"\b(?P<count>[0-9]+(?:\.[0-9]+)?)(?P<unit>[KM])\b|&&|\|\|", re.IGNORECASE | re.ASCII)
_UNITS = {"K": 2**10, "M": 2**20}


def check_where(grid: Grid) -> list[str]:
    """Return what is wrong with a grid's filter, tried on its first point."""
    where = grid.where
    if not isinstance(where, str) or not where.strip():
        return [f"expected an SQL expression over the keys, got {describe(where)}"]
    if (slip := _SLIPS.search(_QUOTED.sub("''", where))) is not None:
        return [f"{describe(where)}: {_instead_of(slip)}"]
    try:
        names = where_keys(where)
        lines = [unknown_key(name, KEYS) for name in names if name not in KEYS]
        if not lines:
            keep_mask(where, written_frame(grid, list(KEYS), 1, {key: np.zeros(1, np.int64) for key in grid.axes}))
    except (pl.exceptions.PolarsError, ValueError) as error:
        lines = [f"{describe(where)}: {' '.join(str(error).split())}"]
    return lines


def _instead_of(slip: re.Match[str]) -> str:
    """Return what to write where SQL reads something else: `128K` as 128 under the name K, `||` as texts joined."""
    if (count := slip["count"]) is None:
        return f"{slip[0]} does not join comparisons in SQL; write {'and' if slip[0] == '&&' else 'or'}"
    return f"SQL does not know {slip[0]} as a number; write {int(float(count) * _UNITS[slip['unit'].upper()])}"


def where_keys(where: str) -> list[str]:
    """Return the keys that a filter looks at; one at least, for a frame without columns has no rows to keep."""
    return list(dict.fromkeys(pl.sql_expr(where).meta.root_names())) or ["phase"]


def keep_mask(where: str, frame: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Return which rows of a frame of keys the filter keeps; an undefined answer (null) keeps none.

    Raises
    ------
    ValueError
        The expression's value is not a truth value for each row.
    """
    answer = frame.with_columns(pl.sql_expr(where).alias("keep"))["keep"]
    if answer.dtype != pl.Boolean:
        raise ValueError(f"expected a comparison, got a value of type {answer.dtype}")
    return answer.fill_null(False).to_numpy()
