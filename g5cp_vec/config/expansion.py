"""A grid becomes rows, without a Python loop over rows.

The cross product is never built as objects. A row is an integer, its position in the product of the axes as written
(the last axis varies fastest), and the position on an axis is a division and a remainder. Keys that change only costs
(the load: sequence length, batch, cached tokens) stay arrays; the others name a deployment, and each combination of
those is built and checked once however many loads it meets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from g5cp_vec.config._frame import without_ignored, written_frame
from g5cp_vec.config._keys import DEPLOYMENT_KEYS, KEYS, LOAD_KEYS
from g5cp_vec.config._where import keep_mask, where_keys
from g5cp_vec.config.context import refused_loads
from g5cp_vec.config.deployment import Deployment, build_deployment
from g5cp_vec.config.limits import at_once, has_limits, over_limits, steps_of
from g5cp_vec.errors import ConfigError, InfeasibleError

if TYPE_CHECKING:
    from g5cp_vec.config.grid import Grid

Ints = npt.NDArray[np.int64]

VALID = -1
# Passes of a chunked prefill, each of which is simulated.
MOST_PASSES = 4096


@dataclass(frozen=True)
class Expansion:
    """The rows of a grid, as arrays of one entry per row.

    Attributes
    ----------
    deployments : list of (Deployment or str)
        Each distinct combination of the keys other than the load; the reason where it cannot be deployed.
    row : ndarray of int64, shape (n_rows,)
        Position in the cross product before the filter, ascending.
    deployment : ndarray of int32, shape (n_rows,)
        Index into `deployments`.
    seq_len, batch, cached_tokens, chunk_tokens : ndarray of int64, shape (n_rows,)
        The load: tokens of context, sequences per replica, tokens of the context that are cached already, and how many
        of the others a pass computes (0 for all of them; what a step of the engine may have where it says).
    reason_code : ndarray of int32, shape (n_rows,)
        Index into `reasons`; ``VALID`` (-1) for a point that can be simulated.
    reasons : list of str
        Why points are invalid, each reason once.
    deployment_keys : polars.DataFrame
        The keys of each deployment, in the order of `deployments`.
    fingerprints : list of tuple of str
        Contents (hashed) of the model, chip, topology and runtime of each deployment.
    """

    deployments: list[Deployment | str]
    row: npt.NDArray[np.int64]
    deployment: npt.NDArray[np.int32]
    seq_len: npt.NDArray[np.int64]
    batch: npt.NDArray[np.int64]
    cached_tokens: npt.NDArray[np.int64]
    chunk_tokens: npt.NDArray[np.int64]
    reason_code: npt.NDArray[np.int32]
    reasons: list[str]
    deployment_keys: pl.DataFrame
    fingerprints: list[tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def keys(self) -> pl.DataFrame:
        """Every key of every row, as the results show it; see :meth:`keys_of`."""
        return self.keys_of(slice(None))

    def keys_of(self, rows: slice | npt.NDArray[np.int64]) -> pl.DataFrame:
        """Return every key of some rows.

        Models, chips and topologies by the name they were written with; ``dp`` and defaulted keys by the value they
        take; null for a ``dp`` that is not whole and for what the point ignores.
        """
        loads = {name: pl.Series(getattr(self, name)[rows]) for name in LOAD_KEYS}
        return self.deployment_keys[self.deployment[rows]].with_columns(**loads).select(list(KEYS))

    @cached_property
    def n_repeated(self) -> int:
        """How many valid rows are another row once more, with its ``point_id``, for all that differs is ignored.

        ``ep`` of a dense model is an axis that makes such rows, and so is one file under two names.
        """
        digests = [d.digest if isinstance(d, Deployment) else 0 for d in self.deployments]
        valid = self.reason_code == VALID
        point = np.array(digests, np.uint64)[self.deployment[valid]].view(np.int64)
        distinct = pl.DataFrame({"d": point, **{key: getattr(self, key)[valid] for key in LOAD_KEYS}}).n_unique()
        return int(valid.sum()) - distinct

    def refuse_invalid(self) -> None:
        """Raise InfeasibleError if any row is invalid, with the first one's reason (``on_invalid = "error"``)."""
        invalid = np.flatnonzero(self.reason_code != VALID)
        if len(invalid):
            first = int(invalid[0])
            reason = self.reasons[self.reason_code[first]]
            count = f"{len(invalid)} of {len(self)} points are invalid"
            raise InfeasibleError(f"{count}; the first is point {self.row[first]}: {reason}")


def expand(grid: Grid) -> Expansion:
    """Return the rows of a grid.

    Raises
    ------
    ConfigError
        The filter fails on some row.
    """
    sizes = {key: len(values) for key, values in grid.axes.items()}
    row = np.arange(grid.n_points, dtype=np.int64)
    row = row[_kept(grid, row, sizes)]

    # A combination is numbered like a row, over the axes that name deployments only.
    choices = {key: size for key, size in sizes.items() if key not in LOAD_KEYS}
    combination = np.zeros(len(row), dtype=np.int64)
    for key, size in choices.items():
        combination = combination * size + _coordinate(row, sizes, key)
    used = np.zeros(math.prod(choices.values()), dtype=np.bool_)
    used[combination] = True
    deployment = (np.cumsum(used, dtype=np.int64) - 1).astype(np.int32)[combination]

    at = np.flatnonzero(used)
    places = {key: _coordinate(at, choices, key) for key in choices}
    written = written_frame(grid, DEPLOYMENT_KEYS, len(at), places)
    deployments, fingerprints = _deployments(grid, list(choices), used)
    load = {key: _load(grid, key, row, sizes) for key in LOAD_KEYS}
    is_prefill = (written["phase"] == "prefill").to_numpy()[deployment]
    # A prompt takes whole steps of its engine.
    steps, chunk = steps_of(deployments, deployment), load["chunk_tokens"]
    load["chunk_tokens"] = np.where(is_prefill & (chunk == 0), steps, chunk)
    reason_code, reasons = _reasons(deployments, deployment, is_prefill, load)
    return Expansion(
        deployments=deployments,
        row=row,
        deployment=deployment,
        reason_code=reason_code,
        reasons=reasons,
        deployment_keys=without_ignored(grid, written),
        fingerprints=fingerprints,
        **load,
    )


def _coordinate(index: npt.NDArray[np.int64], sizes: Mapping[str, int], key: str) -> npt.NDArray[np.int64]:
    """Return the position on one axis of each position in the product of all `sizes`."""
    order = list(sizes)
    stride = math.prod(sizes[later] for later in order[order.index(key) + 1 :])
    return index // stride % sizes[key]


def _kept(grid: Grid, row: npt.NDArray[np.int64], sizes: Mapping[str, int]) -> npt.NDArray[np.bool_] | slice:
    if grid.where is None:
        return slice(None)
    try:
        places = {key: _coordinate(row, sizes, key) for key in sizes}
        return keep_mask(grid.where, written_frame(grid, where_keys(grid.where), len(row), places))
    except (pl.exceptions.PolarsError, ValueError) as error:
        raise ConfigError(f"{grid.name}: points.where: {' '.join(str(error).split())}") from None


def _load(grid: Grid, key: str, row: npt.NDArray[np.int64], sizes: Mapping[str, int]) -> npt.NDArray[np.int64]:
    if key not in grid.axes:
        return np.full(len(row), grid.fixed[key], dtype=np.int64)
    return np.asarray(grid.axes[key], dtype=np.int64)[_coordinate(row, sizes, key)]


def _deployments(
    grid: Grid, choices: Sequence[str], used: npt.NDArray[np.bool_]
) -> tuple[list[Deployment | str], list[tuple[str, ...]]]:
    """Build each combination that some row uses, a reason for one that cannot be; and what its files contain."""
    fixed = {key: value for key, value in grid.fixed.items() if key not in LOAD_KEYS}
    combinations = itertools.product(*(grid.axes[key] for key in choices))
    built: list[Deployment | str] = []
    fingerprints: list[tuple[str, ...]] = []
    for combination in itertools.compress(combinations, used):
        values: dict[str, Any] = {**fixed, **dict(zip(choices, combination, strict=True))}
        values["runtime"] = values["runtime"] or grid.runtime_name(values["topology"], values["chip"])
        for key in ("model", "chip", "topology", "runtime"):
            values[key] = grid.objects[key, values[key]]
        fingerprints.append(tuple(values[key].fingerprint for key in ("model", "chip", "topology", "runtime")))
        try:
            built.append(build_deployment(values))
        except InfeasibleError as error:
            built.append(str(error))
    return built, fingerprints


def _reasons(
    deployments: Sequence[Deployment | str],
    deployment: npt.NDArray[np.int32],
    is_prefill: npt.NDArray[np.bool_],
    load: Mapping[str, npt.NDArray[np.int64]],
) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Return why each row is invalid: its deployment cannot be, or its load leaves nothing to compute."""
    codes: dict[str, int] = {}
    of_deployment = [codes.setdefault(d, len(codes)) if isinstance(d, str) else VALID for d in deployments]
    code = np.array(of_deployment, dtype=np.int32)[deployment]
    seq_len, cached_tokens = load["seq_len"], load["cached_tokens"]
    idle = np.flatnonzero((code == VALID) & is_prefill & (cached_tokens >= seq_len))
    if len(idle):
        pairs, pair_of = np.unique(np.stack([cached_tokens[idle], seq_len[idle]], axis=1), axis=0, return_inverse=True)
        texts = [f"cached_tokens = {cached} leaves no token of seq_len = {total} to prefill" for cached, total in pairs]
        code[idle] = np.array([codes.setdefault(text, len(codes)) for text in texts], dtype=np.int32)[pair_of.ravel()]
    new = seq_len - cached_tokens
    # A chunk as long as the prompt cuts nothing.
    chunk = np.where(load["chunk_tokens"] < new, load["chunk_tokens"], 0)

    by_deployment = np.argsort(deployment, kind="stable")
    bounds = np.searchsorted(deployment[by_deployment], np.arange(len(deployments) + 1))

    def refuse(applies: Callable[[Deployment], bool], refused: Callable[..., Any], *sizes: Ints) -> None:
        for index, dep in enumerate(deployments):
            if isinstance(dep, Deployment) and applies(dep):
                rows = by_deployment[bounds[index] : bounds[index + 1]]
                rows = rows[code[rows] == VALID]
                for at, text in refused(dep, *(values[rows] for values in sizes)):
                    code[rows[at]] = codes.setdefault(text, len(codes))

    refuse(has_limits, over_limits, seq_len, load["batch"], cached_tokens, load["chunk_tokens"])
    together = at_once(steps_of(deployments, deployment), load["batch"], new, chunk)
    n_passes = -(-load["batch"] // together) * np.where(chunk > 0, -(-new // np.maximum(chunk, 1)), 1)
    tiny = np.flatnonzero((code == VALID) & is_prefill & (n_passes > MOST_PASSES))
    if len(tiny):
        sizes = np.stack([load["chunk_tokens"][tiny], load["batch"][tiny], new[tiny]], axis=1)
        triples, pair_of = np.unique(sizes, axis=0, return_inverse=True)
        texts = [
            f"{tokens} tokens{f' of each of {n} sequences' if n > 1 else ''} in steps of {size} (chunk_tokens or "
            f"max_num_batched_tokens) are more than {MOST_PASSES} passes: let a step have more"
            for size, n, tokens in triples.tolist()
        ]
        code[tiny] = np.array([codes.setdefault(text, len(codes)) for text in texts], dtype=np.int32)[pair_of.ravel()]
    refuse(lambda dep: dep.is_sharded, refused_loads, seq_len, together, cached_tokens, chunk)
    replicas = np.array([0 if isinstance(d, str) else d.dp for d in deployments], dtype=np.float64)[deployment]
    most = np.array([1 if isinstance(d, str) else d.most_tokens for d in deployments], dtype=np.float64)[deployment]
    huge = np.flatnonzero((code == VALID) & (replicas * load["batch"] * seq_len > most))
    if len(huge):
        limits, limit_of = np.unique(most[huge], return_inverse=True)
        texts = [f"dp * batch * seq_len exceeds {int(m)} tokens: exact byte counts would leave 64 bits" for m in limits]
        code[huge] = np.array([codes.setdefault(text, len(codes)) for text in texts], dtype=np.int32)[limit_of.ravel()]
    return code, list(codes)
