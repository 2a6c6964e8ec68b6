"""The chip in the grouped YAML of pod / rack / board / chip tools (the rest of the file: `g5cp_vec.config.grouped`).

Read of ``chips.NAME``: ``memory.gmem`` (``capacity_gb``, ``bandwidth_gbps``, both decimal gigabytes, and
``utilization``, also written ``bandwidth_utilization``, as the fraction of the memory bandwidth that kernels reach);
``compute_efficiency`` as the fraction of the peak that GEMMs and attention reach; and for the peak rate of each element
type ``2 * compute_units.cube.mac_per_lane.TYPE * cores.lanes_per_core * cores.count * frequency_ghz``, which is how the
tools that write such files define it. On-chip memories, DMA engines, the on-chip network and vector units are not
modelled, and are passed over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from g5cp_vec.config._files import describe
from g5cp_vec.config._yaml import read_yaml
from g5cp_vec.config.dtypes import DTYPE_BITS
from g5cp_vec.errors import ConfigError

# Products of a few numbers of such sizes are numbers too.
_LEAST, _MOST = 1e-6, 1e15
_MOST_GIGABYTES = 1e9
_LEAST_RATE, _MOST_RATE = 1.0, 1e30


class _Reader:
    """Numbers at dotted places of a table; complaints are collected."""

    def __init__(self, label: str, table: dict[str, Any]) -> None:
        self.label, self.whole = label, table
        self.lines: list[str] = []

    def complain(self, place: str, problem: str) -> None:
        self.lines.append(f"{self.label}.{place}: {problem}")

    def table(self, place: str) -> dict[str, Any]:
        """Return the table at a place; empty where there is none."""
        table = self.whole
        keys = place.split(".")
        for step, key in enumerate(keys):
            found = table.get(key, {})
            if not isinstance(found, dict):
                self.complain(".".join(keys[: step + 1]), f"expected a table, got {describe(found)}")
                return {}
            table = found
        return table

    def number(self, place: str, *, most: float = _MOST) -> float:
        """Return the positive number at a place; 1 after a complaint."""
        parent, _, key = place.rpartition(".")
        table = self.table(parent) if parent else self.whole
        value = table.get(key)
        if key not in table:
            self.complain(place, "missing, expected a number")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST <= value <= most:
            self.complain(place, f"expected a number from {_LEAST:g} to {most:g}, got {describe(value)}")
        else:
            return float(value)
        return 1.0


def read_grouped_chip(path: Path) -> dict[str, Any]:
    """Return the fields of the chip (`g5cp_vec.config.chip.Chip`) that a grouped YAML file describes.

    Raises
    ------
    ConfigError
        The file describes no chip, several kinds, or one without what a simulation needs.
    """
    chips = read_yaml(path).get("chips")
    if not isinstance(chips, dict) or len(chips) != 1:
        found = "missing" if chips is None else describe(list(chips) if isinstance(chips, dict) else chips)
        raise ConfigError(f"{path}: chips: expected a table that describes one kind of chip, got {found}")
    ((name, table),) = chips.items()
    place = f"{path}: chips.{name}"
    if not name or not isinstance(table, dict):
        raise ConfigError(f"{place}: expected a name and a table, got {describe(table)}")
    read = _Reader(place, table)
    gmem = "memory.gmem"
    utilization = "utilization" if "utilization" in read.table(gmem) else "bandwidth_utilization"
    efficiency: dict[str, float] = {}
    if utilization in read.table(gmem):
        efficiency["memory"] = read.number(f"{gmem}.{utilization}", most=1.0)
    if "compute_efficiency" in table:
        efficiency["gemm"] = efficiency["attention"] = read.number("compute_efficiency", most=1.0)
    fields = {
        "name": name,
        "hbm_bytes": round(read.number(f"{gmem}.capacity_gb", most=_MOST_GIGABYTES) * 1e9),
        "hbm_bandwidth_bytes_per_s": read.number(f"{gmem}.bandwidth_gbps") * 1e9,
        "efficiency": efficiency,
        "peak_flops": _peaks(read),
    }
    if read.lines:
        raise ConfigError(read.lines)
    return fields


def _peaks(read: _Reader) -> dict[str, float]:
    """Return the peak rate (flop/s) of every element type that the tool and this package both know."""
    place = "compute_units.cube.mac_per_lane"
    macs = read.table(place)
    if not macs:
        hint = "name a chip preset or a TOML file in its place, which gives them as peak_tflops"
        read.complain(place, f"missing, and peak rates follow from it; {hint}")
        return {}
    if "BF16" not in macs:
        read.complain(f"{place}.BF16", "missing, other types without a rate of their own fall back to it")
    lanes_per_s = read.number("cores.count") * read.number("cores.lanes_per_core") * read.number("frequency_ghz") * 1e9
    peaks: dict[str, float] = {}
    for key in macs:
        if key.lower() in DTYPE_BITS:
            rate = 2 * read.number(f"{place}.{key}") * lanes_per_s
            if not _LEAST_RATE <= rate <= _MOST_RATE:
                limits = f"{_LEAST_RATE:g} to {_MOST_RATE:g}"
                read.complain(f"{place}.{key}", f"expected a peak rate from {limits} flop/s, with all lanes {rate:g}")
            elif key.lower() in peaks:
                read.complain(f"{place}.{key}", "stands twice, in other capitals; keep one of them")
            peaks[key.lower()] = rate
    return peaks
