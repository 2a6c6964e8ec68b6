"""Keys as columns: a grid's values gathered by axis coordinates, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from g5cp_vec.config._keys import DECODE_FORM, KEYS, PREFILL_FORM
from g5cp_vec.config.context import (
    A2A_FP32,
    AG_RS,
    ALL_GATHER,
    ALL_TO_ALL,
    ALLGATHER_KV,
    ALLGATHER_Q,
    BLOCK_SIZE,
    SEMANTICS,
    prefers_gathered_queries,
)
from g5cp_vec.config.context_kinds import has_sparse, is_sparse_only

if TYPE_CHECKING:
    from g5cp_vec.config.grid import Grid

# What the values of these follow from, so that a frame of some keys has the columns it needs.
_SOURCES = {
    "dp": ("n_chips", "tp", "pp", "cp", "pcp"),
    "cp_semantics": ("pcp", "dcp"),
    "interleave": ("pcp", "dcp", "model", "block_size", "cp_semantics"),
    "block_size": ("pcp", "dcp"),
    "moe_dispatch": ("pcp",),
    "prefill_form": ("pcp", "dcp", "model", "cp_semantics"),
    "decode_form": ("pcp", "dcp", "cp_semantics"),
    "runtime": ("topology", "chip"),
    "dtype": ("model",),
    "ffn_dtype": ("model", "dtype"),
    "kv_dtype": ("model",),
}


def _column(key: str, values: Sequence[Any]) -> pl.Series:
    if KEYS[key].least is not None:  # a dp of "auto" is unknown for now
        return pl.Series(key, [None if value == "auto" else value for value in values], dtype=pl.Int64)
    if key == "tp_sp":
        return pl.Series(key, values, dtype=pl.Boolean)
    texts = [",".join(value) if isinstance(value, tuple) else value for value in values]
    return pl.Series(key, texts, dtype=pl.String)


def written_frame(
    grid: Grid, keys: Sequence[str], n_rows: int, coordinates: Mapping[str, npt.NDArray[np.int64]]
) -> pl.DataFrame:
    """Return the values of `keys`, defaults and derived values filled in, one row per point.

    Parameters
    ----------
    grid : Grid
    keys : sequence of str
    n_rows : int
    coordinates : mapping of str to ndarray of int64, shape (n_rows,)
        Position of each row on each axis; an axis that no key needs may be left out.

    Returns
    -------
    polars.DataFrame
        Columns as in `keys`; ``dp`` is null where ``"auto"`` has no whole value.
    """
    needed = dict.fromkeys(source for key in keys for source in (*_SOURCES.get(key, ()), key))
    frame = pl.DataFrame(
        [
            _column(key, grid.axes[key]).gather(coordinates[key])
            if key in grid.axes
            else _column(key, [grid.fixed[key]]).new_from_index(0, n_rows)
            for key in needed
        ]
    )
    if "dp" in needed:
        replica = pl.col("tp") * pl.col("pp") * pl.col("cp") * pl.col("pcp")
        whole = pl.when(pl.col("n_chips") % replica == 0).then(pl.col("n_chips") // replica)
        frame = frame.with_columns(dp=pl.coalesce("dp", whole))
    frame = _with_context(grid, frame)
    if "runtime" in needed:
        frame = frame.with_columns(runtime=pl.coalesce("runtime", _default_runtimes(grid)))
    stored = {text: grid.objects["model", text].default_dtypes for text in grid.values("model")}

    def published(module: str) -> pl.Expr:
        return pl.col("model").replace_strict({text: getattr(types, module) for text, types in stored.items()})

    if "ffn_dtype" in needed:  # before dtype, which decides it where the grid says one
        frame = frame.with_columns(ffn_dtype=pl.coalesce("ffn_dtype", "dtype", published("ffn")))
    if "dtype" in needed:
        frame = frame.with_columns(dtype=pl.coalesce("dtype", published("attention")))
    if "kv_dtype" in needed:
        frame = frame.with_columns(kv_dtype=pl.coalesce("kv_dtype", published("kv")))
    return frame.select(keys)


def _with_context(grid: Grid, frame: pl.DataFrame) -> pl.DataFrame:
    """Fill in what says how a context is split, as `g5cp_vec.config.context` does for one point; null without split."""
    shared = pl.col("pcp") * pl.col("dcp") > 1
    is_multiplicative = pl.col("cp_semantics").fill_null(SEMANTICS[0]) == SEMANTICS[0]
    # The forms first: their defaults depend on the semantics.
    if "prefill_form" in frame.columns:
        gathering = [text for text in grid.values("model") if prefers_gathered_queries(grid.objects["model", text])]
        choosing = [text for text in grid.values("model") if is_sparse_only(grid.objects["model", text])]
        sends_queries = pl.col("model").is_in(gathering) | pl.col("model").is_in(choosing) & ~is_multiplicative
        with_dcp = pl.when(sends_queries).then(pl.lit(ALLGATHER_Q)).otherwise(pl.lit(ALLGATHER_KV))
        default = pl.when(pl.col("pcp") > 1).then(pl.lit(ALLGATHER_KV)).when(pl.col("dcp") > 1).then(with_dcp)
        frame = frame.with_columns(prefill_form=pl.coalesce("prefill_form", default.otherwise(pl.lit(PREFILL_FORM))))
    if "decode_form" in frame.columns:
        sharded = pl.when(is_multiplicative).then(pl.lit(A2A_FP32)).otherwise(pl.lit(AG_RS))
        by_degrees = pl.when(shared).then(sharded).otherwise(pl.lit(DECODE_FORM))
        frame = frame.with_columns(decode_form=pl.coalesce("decode_form", by_degrees))
    if "moe_dispatch" in frame.columns:
        dispatch = pl.when(pl.col("pcp") > 1).then(pl.lit(ALL_GATHER)).otherwise(pl.lit(ALL_TO_ALL))
        frame = frame.with_columns(moe_dispatch=pl.coalesce("moe_dispatch", dispatch))
    defaults: dict[str, pl.Expr] = {
        "cp_semantics": pl.lit(SEMANTICS[0]),
        "interleave": pl.lit(1),
        "block_size": pl.lit(BLOCK_SIZE),
    }
    if "interleave" in frame.columns:
        sparse = [text for text in grid.values("model") if has_sparse(grid.objects["model", text])]
        by_blocks = pl.col("model").is_in(sparse) & is_multiplicative
        blocks = pl.coalesce("block_size", defaults["block_size"])
        defaults["interleave"] = pl.when(by_blocks).then(blocks).otherwise(defaults["interleave"])
    for key, otherwise in defaults.items():
        if key in frame.columns:
            frame = frame.with_columns(pl.when(shared).then(pl.coalesce(key, otherwise)).alias(key))
    return frame


def _default_runtimes(grid: Grid) -> pl.Expr:
    """Return the expression for the name of the runtime of a row that names none."""
    named: pl.Expr = pl.lit(None, dtype=pl.String)
    for topology in grid.values("topology"):
        for chip in grid.values("chip"):
            runtime = grid.objects["runtime", grid.runtime_name(topology, chip)].name
            here = (pl.col("topology") == topology) & (pl.col("chip") == chip)
            named = pl.when(here).then(pl.lit(runtime)).otherwise(named)
    return named


def without_ignored(grid: Grid, frame: pl.DataFrame) -> pl.DataFrame:
    """Blank what a point ignores: ``ep`` and dispatch of a dense model, the form of the other phase."""
    experts = [text for text in grid.values("model") if grid.objects["model", text].has_experts]
    return frame.with_columns(
        *(pl.when(pl.col("model").is_in(experts)).then(key).alias(key) for key in ("ep", "moe_dispatch")),
        pl.when(pl.col("phase") == "prefill").then("prefill_form").alias("prefill_form"),
        pl.when(pl.col("phase") == "decode").then("decode_form").alias("decode_form"),
    )
