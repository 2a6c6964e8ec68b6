"""Chip files with a calibration."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from g5cp_vec.config._files import read_toml
from g5cp_vec.config._text import in_unicode
from g5cp_vec.config.calibration import Calibration, Surface
from g5cp_vec.errors import ConfigError

_HEADER = "[calibration]"


def chip_text(path: Path, calibration: Calibration) -> str:
    """Return a chip file's text with another calibration; what else it says stays as it is written.

    Raises
    ------
    ConfigError
        Something stands below the file's ``[calibration]``.
    """
    written = path.read_text(encoding="utf-8")
    kept: list[str] = []
    for line in written.splitlines():
        if line.strip().startswith(_HEADER):
            break
        kept.append(line)
    body = "\n".join(kept).rstrip() + "\n"
    expected = {key: value for key, value in read_toml(path).items() if key != "calibration"}
    if tomllib.loads(body) != expected:
        raise ConfigError(f"{path}: {_HEADER}: expected to be the last table of the file; move it to the end")
    name = "" if "name" in expected else f"name = {_text(in_unicode(path.stem))}\n"
    return name + body + "\n" + "\n".join(_calibration_lines(calibration)) + "\n"


def _calibration_lines(calibration: Calibration) -> list[str]:
    lines = [
        f"{_HEADER}  # written by g5cp-vec calibrate",
        f"source = {_text(calibration.source)}",
        f"fitted = {_text(calibration.fitted)}",
        f"tables = [{', '.join(_text(name) for name in calibration.tables)}]",
    ]
    if calibration.memory_efficiency is not None:
        lines.append(f"memory_efficiency = {calibration.memory_efficiency:g}  # element-wise work")
    for surface in calibration.surface:
        lines += ["", "[[calibration.surface]]", *_surface_lines(surface)]
    return lines


def _surface_lines(surface: Surface) -> list[str]:
    lines = [
        f"kind = {_text(surface.kind)}",
        f"library = {_text(surface.library)}",
        f"labels = {_table(surface.labels)}",
        f"arithmetic_dtype = {_text(surface.arithmetic_dtype)}",
        f"default_for = {_text(surface.default_for)}",
        f"constants = {_table(surface.constants)}",
        f"overhead_us = {_number(surface.overhead_s * 1e6)}",
        f"arithmetic_efficiency = {_number(surface.arithmetic_efficiency)}",
        f"memory_efficiency = {_number(surface.memory_efficiency)}",
        f"n_rows = {surface.n_rows}",
    ]
    if surface.median_error is not None and surface.p90_error is not None:
        lines += [
            f"median_error = {_number(surface.median_error)}",
            f"p90_error = {_number(surface.p90_error)}",
        ]
    axes = [f"{name} = [{', '.join(_node(node) for node in nodes)}]" for name, nodes in surface.axes]
    lines.append(f"axes = {{{', '.join(axes)}}}")
    width = len(surface.axes[-1][1])
    lines.append("duration_us = [")
    for begin in range(0, len(surface.duration_s), width):
        lines.append(f"  {', '.join(_number(x * 1e6) for x in surface.duration_s[begin : begin + width])},")
    lines.append("]")
    return lines


def _number(value: float) -> str:
    return f"{value:.6g}"


def _node(value: float) -> str:
    """Nodes are exact: a shape of the table must not lie outside it by rounding."""
    return str(int(value)) if value == int(value) else repr(value)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _table(pairs: Any) -> str:
    return "{" + ", ".join(f"{k} = {_text(v) if isinstance(v, str) else _number(v)}" for k, v in pairs) + "}"
