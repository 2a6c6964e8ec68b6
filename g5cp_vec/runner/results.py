"""Columns of results from what was computed: times, memory, traffic, identity. All arrays, no loop over points."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from g5cp_vec import __version__
from g5cp_vec.config.context import PASS_KV
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.cost.math_path import MathTimes
from g5cp_vec.cost.model_flops import model_flops
from g5cp_vec.cost.rows import Coverage
from g5cp_vec.engine import measure
from g5cp_vec.errors import SimulationError
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel
from g5cp_vec.mapping.network import Network
from g5cp_vec.runner.passes import Passes, Point, distinct
from g5cp_vec.runner.schema import SCHEMA
from g5cp_vec.runner.template import TRAFFIC, Template, busiest_link, most_sent

Columns = dict[str, Any]


def point_ids(digest: NDArray[np.uint64], loads: tuple[NDArray[np.int64], ...]) -> list[str]:
    """Return a stable 16-digit id per point: its deployment's hash mixed with each load key (splitmix64)."""
    state = digest
    for values in loads:
        state = _splitmix(state ^ _splitmix(values.astype(np.uint64)))
    text = state.astype(">u8").tobytes().hex()
    return [text[i : i + 16] for i in range(0, len(text), 16)]


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One round of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), a bijection of 64-bit words; wraps on purpose."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# How columns of several passes become one; what is not named here is summed.
_LARGEST = ("peak_ring_blocks",)


def over_passes(columns: Columns, passes: Passes) -> Columns:
    """Return columns of rows from those of their passes."""
    if len(passes.seq_len) == len(passes.first):
        return columns
    whole = {name: passes.max(c) if name in _LARGEST else passes.sum(c) for name, c in columns.items()}
    return {**whole, **_overlap(whole["comm_s"], whole["exposed_comm_s"])}


def memory_columns(dep: Deployment, point: Point, passes: Passes) -> Columns:
    """Context and memory of every point in the pass that needs most, whether it fits, and the longest that would."""
    model = MemoryModel(dep)
    memory = model.at(*passes.load, passes.held)
    fullest = passes.largest(memory.peak_bytes)
    of_load, which = distinct(point[1:])
    longest = model.max_seq_len(*of_load)[which]
    # All that are held are computed together, but where an engine's step says otherwise.
    in_steps = dep.step_tokens is not None and dep.phase == "prefill"
    sizes, of_size = distinct((passes.seq_len, passes.cached_tokens, *([passes.batch] if in_steps else [])))
    n_sequences = model.max_sequences(*sizes)[of_size]
    fits = memory.peak_bytes[fullest] <= model.usable_bytes
    load = build_load(dep, *passes.load)
    context = load.context if dep.phase == "prefill" else load.cached
    return {
        **({"n_passes": passes.n_each} if dep.phase == "prefill" else {}),
        "padded_seq_len": passes.max(context + 0 * passes.batch),
        "kv_bytes": memory.kv_bytes[fullest],
        "weight_bytes": memory.weight_bytes[fullest],
        "activation_bytes": memory.activation_bytes[fullest],
        "buffer_bytes": memory.buffer_bytes[fullest],
        "peak_bytes": memory.peak_bytes[fullest],
        "hbm_bytes": np.full(len(fits), dep.chip.hbm_bytes),
        "fits": fits,
        "max_seq_len": longest,
        "max_concurrent_seqs": -passes.max(-n_sequences),  # as many as fit in every pass
        "status": np.where(fits, "ok", "oom").tolist(),
    }


def calibration_columns(dep: Deployment, passes: Passes, covered: Coverage | None, unmeasured: list[str]) -> Columns:
    """Whether every compute of a point is priced by measurements, which are not, and how far outside them it is.

    ``covered`` of all passes; None where the chip is not calibrated. ``unmeasured`` collectives of them.
    """
    n_points = len(passes.first)
    named = {"unmeasured_collectives": [", ".join(unmeasured) or None] * n_points}
    if covered is None:
        return {"calibrated": np.full(n_points, dep.chip.calibrated), **named}
    columns: Columns = {
        **named,
        "calibrated": np.full(n_points, not covered.uncalibrated),
        "extrapolated": passes.max(covered.extrapolated),
    }
    if covered.uncalibrated:
        columns["uncalibrated_parts"] = [", ".join(covered.uncalibrated)] * n_points
    return columns


class Useful(NamedTuple):
    """What every point is for: FLOPs of the model, the peak rate of the type most of them run in, and new tokens."""

    flops: NDArray[np.float64]
    peak_flops_per_s: NDArray[np.float64]
    new_tokens: NDArray[np.int64]


def useful_work(dep: Deployment, point: Point) -> Useful:
    """Return what every point is for."""
    load = build_load(dep, *point[:3])
    flops = model_flops(dep, load)
    totals = np.empty((len(flops), len(point.seq_len)))
    for row, of_type in enumerate(flops.values()):
        totals[row] = of_type
    peaks = np.array([dep.chip.peak(dtype) for dtype in flops])[totals.argmax(axis=0)]
    return Useful(totals.sum(axis=0), peaks, dep.dp * load.batch * load.new_unpadded)


def step_columns(dep: Deployment, useful: Useful, step_s: NDArray[np.float64]) -> Columns:
    """Derive what follows from the time of the step alone."""
    return {
        "ttft_s" if dep.phase == "prefill" else "tpot_s": step_s,
        "step_s": step_s,
        "mfu": useful.flops / (step_s * dep.n_chips * useful.peak_flops_per_s),
        "tokens_per_s_per_chip": useful.new_tokens / step_s / dep.n_chips,
    }


def simulated_columns(
    dep: Deployment,
    network: Network,
    template: Template,
    measures: NDArray[np.float64],
    duration_s: NDArray[np.float64],
    fixed_s: NDArray[np.float64],
) -> Columns:
    """Read the times of the reported rank off the measures, shape (n_points, N_MEASURES), and the op durations.

    ``fixed_s`` is the part of each duration that is no work, at full speed.
    """
    chip = measures[:, measure.CHIP].astype(np.int64)

    def busy(which: str) -> NDArray[np.float64]:
        result: NDArray[np.float64] = (template.computes[which][chip] * duration_s).sum(axis=1)
        return result

    # A slow chip stretches the fixed costs of its ops too.
    speed = np.asarray(network.rates())[network.chip_rate[template.chips[chip]]]
    columns = {
        "compute_s": busy("all"),
        "attention_s": busy("attention"),
        "overhead_s": (template.computes["all"][chip] * fixed_s).sum(axis=1) / speed,
        **_overlap(measures[:, measure.COMM_S], measures[:, measure.EXPOSED_COMM_S]),
    }
    if has_ring(dep):
        columns |= {
            "ring_s": measures[:, measure.RING_S],
            "ring_compute_s": busy("ring"),
            "ring_comm_s": measures[:, measure.RING_COMM_S],
            "peak_ring_blocks": measures[:, measure.PEAK_RING_BLOCKS].astype(np.int64),
        }
    return columns


def _overlap(comm: NDArray[np.float64], exposed: NDArray[np.float64]) -> Columns:
    # Two sums of the same waits may differ in their last digit.
    share = np.maximum(1.0 - np.divide(exposed, comm, out=np.zeros_like(comm), where=comm > 0), 0.0)
    return {"comm_s": comm, "exposed_comm_s": exposed, "overlap_ratio": np.where(comm > 0, share, np.nan)}


def traffic_columns(
    dep: Deployment,
    template: Template,
    message_bytes: NDArray[np.int64],
    capacity: NDArray[np.float64],
    step_s: NDArray[np.float64],
) -> Columns:
    """Bytes sent by the rank that sends most, by kind of traffic, and the busiest link."""
    columns: Columns = {name: most_sent(template, name, message_bytes) for name in TRAFFIC if applies(dep, name)}
    columns["bottleneck_link"], columns["bottleneck_utilisation"] = busiest_link(
        template, message_bytes, capacity, step_s
    )
    return columns


def math_columns(dep: Deployment, times: MathTimes, n_points: int) -> Columns:
    """Columns of the closed form: all communication is exposed, nothing is simulated."""
    columns: Columns = {
        "compute_s": times.compute_s,
        "attention_s": times.attention_s,
        "overhead_s": times.overhead_s,
        **_overlap(times.comm_s, times.comm_s),
    }
    for name in ("tp_bytes", "ep_bytes", "pp_bytes"):
        if applies(dep, name):
            columns[name] = np.broadcast_to(getattr(times, name), (n_points,))
    return columns


def has_ring(dep: Deployment) -> bool:
    """Whether a prefill passes keys and values around a ring."""
    return dep.phase == "prefill" and dep.sequence_ranks > 1 and dep.prefill_form == PASS_KV


def applies(dep: Deployment, traffic: str) -> bool:
    """Whether a kind of traffic exists for a deployment; where it does not, its column is null."""
    if traffic == "passkv_bytes":
        return has_ring(dep) or (dep.phase == "prefill" and dep.cp > 1)
    if traffic.startswith("passq"):
        return dep.phase == "decode" and dep.cp > 1
    if traffic in ("pcp_bytes", "dcp_bytes"):
        return (dep.pcp if traffic == "pcp_bytes" else dep.dcp) > 1
    if traffic == "ep_bytes":
        return dep.model.has_experts
    return dep.tp > 1 if traffic == "tp_bytes" else dep.pp > 1


def assemble(pieces: list[tuple[int, Columns]], keys: pl.DataFrame, identity: Columns) -> pl.DataFrame:
    """Build one frame from the columns of several slices.

    Parameters
    ----------
    pieces : list of (n_rows, columns)
        A column that a piece lacks is null there, and so is None; NaN is where a column may be undefined.
    keys : DataFrame
        The key columns of all rows, in the same order.
    identity : dict
        Columns that tell the rows, likewise.
    """
    series = []
    for name, dtype in SCHEMA.items():
        if name in keys.columns:
            series.append(keys[name].cast(dtype))
        elif name in identity:
            series.append(pl.Series(name, identity[name], dtype))
        elif name == "g5cp_version":
            series.append(pl.Series(name, [__version__], dtype).new_from_index(0, keys.height))
        else:
            series.append(_column(name, dtype, pieces))
    return pl.DataFrame(series)


# Undefined without communication; any other NaN is a defect.
_MAY_BE_NAN = ("overlap_ratio", "bottleneck_utilisation")
_NUMPY = {pl.Float64: np.float64, pl.Int64: np.int64, pl.Boolean: np.bool_}


def _column(name: str, dtype: type[pl.DataType], pieces: list[tuple[int, Columns]]) -> pl.Series:
    """One column over all pieces, as an Arrow array with a mask: one allocation however many pieces there are."""
    n_rows = sum(n for n, _ in pieces)
    if dtype not in _NUMPY:
        values: list[Any] = []
        for n, columns in pieces:
            values += columns.get(name, [None] * n)
        return pl.Series(name, values, dtype)
    filled: NDArray[Any] = np.zeros(n_rows, _NUMPY[dtype])
    is_null = np.zeros(n_rows, np.bool_)
    begin = 0
    for n, columns in pieces:
        part = slice(begin, begin + n)
        begin += n
        value = columns.get(name)
        if value is None:
            is_null[part] = True
        elif isinstance(value, list):  # audited rows hold integers, the others None
            known = np.array([v is not None for v in value])
            filled[part][known] = [v for v in value if v is not None]
            is_null[part] = ~known
        else:
            filled[part] = value
    if name in _MAY_BE_NAN:
        is_null |= np.isnan(filled)
    elif dtype == pl.Float64 and not np.isfinite(filled).all():
        raise SimulationError(f"{name}: a result is not a finite number")
    return pl.Series(name, pa.array(filled, mask=is_null))
