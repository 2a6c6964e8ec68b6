"""A grid file becomes a :class:`Grid`: every value read, every named file loaded, every complaint collected.

A grid fixes some keys and crosses the others; a point is a grid with nothing to cross. The keys and their readers are
in ``_keys``, what happens to the cross product is in ``expansion``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g5cp_vec.config._files import describe, read_toml, unknown_key
from g5cp_vec.config._keys import KEYS, RANK_ORDER, Key, expected, read_range
from g5cp_vec.config._record import Record
from g5cp_vec.config._text import in_unicode
from g5cp_vec.config._where import check_where
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.expansion import Expansion, expand
from g5cp_vec.config.model import load_model
from g5cp_vec.config.runtime import IDEAL, load_runtime
from g5cp_vec.config.topology import load_topology
from g5cp_vec.errors import ConfigError

# A row costs about 100 bytes of arrays before anything is simulated.
MAX_POINTS = 50_000_000

_LOADERS: dict[str, Callable[[str, Path | None], Record]] = {
    "model": load_model,
    "chip": load_chip,
    "topology": load_topology,
    "runtime": load_runtime,
}
_MIGRATION = (
    "missing; context parallelism is a dimension of its own now and has no default: add cp = 1 under [fixed] "
    "to keep the old meaning (dp*tp*pp*cp = n_chips)"
)


@dataclass(frozen=True)
class Grid:
    """A checked grid.

    Attributes
    ----------
    name : str
    fixed : dict
        Every key that is not an axis, defaults filled in; None where the value follows from the rest of a point.
    axes : dict
        Values of every axis, as ordered in the file.
    on_invalid : {"record", "error"}
        Whether a combination that cannot be is a row of its own or stops the sweep.
    where : str or None
        SQL expression over the keys; rows for which it is not true are left out.
    objects : dict
        The loaded files by (key, name as written), runtimes that a topology or chip names included.
    label : str
        What complaints call it: its file.
    """

    name: str
    fixed: dict[str, Any]
    axes: dict[str, list[Any]]
    on_invalid: str = "record"
    where: str | None = None
    objects: dict[tuple[str, str], Any] = field(default_factory=dict)
    label: str = field(default="<mapping>", compare=False)

    @property
    def n_points(self) -> int:
        """Size of the cross product, before `where`."""
        return math.prod(len(values) for values in self.axes.values())

    def values(self, key: str) -> list[Any]:
        """Return the values that a key takes, in order."""
        return self.axes[key] if key in self.axes else [self.fixed[key]]

    def runtime_name(self, topology: str, chip: str) -> str:
        """Return the runtime of a point that names none: the topology's, else the chip's, else the ideal one."""
        named = self.objects["topology", topology].runtime or self.objects["chip", chip].runtime
        return named or IDEAL

    def notes(self) -> list[str]:
        """Return what was left out or assumed of the models that the grid names, one line each."""
        models = [(text, record) for (key, text), record in self.objects.items() if key == "model"]
        return [f"{text}: {note}" for text, model in models for note in model.notes]

    def canonical(self) -> dict[str, Any]:
        """Return the grid and the contents of its files as plain data for a manifest and its hash."""
        files: dict[str, dict[str, Any]] = {}
        for (key, text), record in sorted(self.objects.items()):
            files.setdefault(key, {})[text] = record.model_dump(mode="json")
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in self.fixed.items()}
        axes = {k: [list(v) if isinstance(v, tuple) else v for v in values] for k, values in self.axes.items()}
        return {
            "name": self.name,
            "fixed": plain,
            # A list, because the order of axes is the order of rows and objects of JSON have none.
            "axes": [[key, values] for key, values in axes.items()],
            "on_invalid": self.on_invalid,
            "where": self.where,
            "files": files,
        }

    def expand(self) -> Expansion:
        """Return the rows of the grid; see :class:`g5cp_vec.config.expansion.Expansion`."""
        return expand(self)


def load_grid(source: str | Path | Mapping[str, Any], *, point: bool = False) -> Grid:
    """Read and check a grid.

    Parameters
    ----------
    source : path or mapping
        A TOML file, or its parsed contents.
    point : bool
        Whether the file describes one point, so that only ``[fixed]`` and ``name`` may stand in it.

    Raises
    ------
    ConfigError
        With every complaint about the grid and about the files it names.
    """
    if isinstance(source, Mapping):
        label, folder, table = "<mapping>", None, dict(source)
    else:
        path = Path(source)
        label, folder, table = str(path), path.parent, read_toml(path)
    reader = _Reader(label, folder)
    grid = reader.read(table, default_name="grid" if folder is None else in_unicode(path.stem), point=point)
    if reader.lines:
        raise ConfigError(reader.lines)
    return grid


def load_point(source: str | Path | Mapping[str, Any]) -> Grid:
    """Read and check a point file; return it as a grid of one row."""
    return load_grid(source, point=True)


class _Reader:
    """Collects complaints while it reads, so that one attempt shows them all."""

    def __init__(self, label: str, folder: Path | None) -> None:
        self.label, self.folder = label, folder
        self.lines: list[str] = []

    def complain(self, place: str, message: object) -> None:
        self.lines.append(f"{self.label}: {place}: {message}" if place else f"{self.label}: {message}")

    def read(self, table: Mapping[str, Any], *, default_name: str, point: bool) -> Grid:
        if point and ("axes" in table or "points" in table):
            others = " and ".join(f"[{entry}]" for entry in ("axes", "points") if entry in table)
            raise ConfigError(f"{self.label}: has {others}, a point has [fixed] only; use g5cp-vec sweep for a grid")
        tables = ("name", "fixed") if point else ("name", "fixed", "axes", "points")
        sections = "[fixed]" if point else "[fixed] or [axes]"
        for entry in table:
            if entry in KEYS:
                self.complain(entry, f"belongs under {sections}")
            elif entry not in tables:
                self.complain(str(entry), unknown_key(str(entry), tables))
        name = table.get("name", default_name)
        if not isinstance(name, str) or not name:
            self.complain("name", expected("a text", name))
        written = self.table(table, "fixed")
        crossed = {} if point else self.table(table, "axes")
        points = {} if point else self.table(table, "points")

        fixed = {key: self.value(f"fixed.{key}", KEYS[key], written[key]) for key in self.known("fixed", written)}
        axes = {key: self.axis(f"axes.{key}", KEYS[key], crossed[key]) for key in self.known("axes", crossed)}
        for key in fixed.keys() & axes.keys():
            self.complain(f"axes.{key}", "also under [fixed]; keep one of the two")
        for key, spec in KEYS.items():
            if key in fixed or key in axes:
                continue
            if spec.required and key not in table:
                self.complain(key, _MIGRATION if key == "cp" else f"missing, expected under {sections}")
            fixed[key] = spec.default
        grid = Grid(str(name), fixed, axes, self.on_invalid(points), points.get("where"), {}, self.label)
        if grid.n_points > MAX_POINTS:
            self.complain("axes", f"{grid.n_points} points, expected at most {MAX_POINTS}; shorten or fix an axis")
        self.load_files(grid)
        # The filter is tried on the keys' types, which are not known before everything else is right.
        if grid.where is not None and not self.lines:
            for line in check_where(grid):
                self.complain("points.where", line)
        return grid

    def table(self, parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        entry = parent.get(name, {})
        if isinstance(entry, Mapping):
            return entry
        self.complain(name, expected("a table", entry))
        return {}

    def known(self, place: str, table: Mapping[str, Any]) -> list[str]:
        for key in table:
            if key not in KEYS:
                self.complain(f"{place}.{key}", unknown_key(str(key), KEYS))
        return [key for key in table if key in KEYS]

    def value(self, place: str, key: Key, written: Any) -> Any:
        """Return the value read, or the default after a complaint: reading goes on for the sake of the others."""
        try:
            return key.read(written)
        except ValueError as error:
            several = isinstance(written, list | Mapping) and key.default != RANK_ORDER and place.startswith("fixed")
            hint = "; several values belong under [axes]" if several else ""
            self.complain(place, f"{error}{hint}")
            return key.default

    def axis(self, place: str, key: Key, written: Any) -> list[Any]:
        if isinstance(written, Mapping) and key.least is not None:
            try:
                return list(read_range(key, written))
            except ValueError as error:
                self.complain(place, error)
                return []
        if not isinstance(written, list | tuple) or not written:
            shape = "a list of values" + ("" if key.least is None else " or a range {from, to, steps}")
            self.complain(place, expected(shape, written))
            return []
        values: list[Any] = []
        for position, entry in enumerate(written):
            before = len(self.lines)
            value = self.value(f"{place}[{position}]", key, entry)
            if len(self.lines) > before:
                continue
            if value in values:
                self.complain(f"{place}[{position}]", f"{describe(entry)} stands in the list already")
            else:
                values.append(value)
        return values

    def on_invalid(self, points: Mapping[str, Any]) -> str:
        known = ("on_invalid", "where")
        for entry in points:
            if entry not in known:
                self.complain(f"points.{entry}", unknown_key(str(entry), known))
        choice = points.get("on_invalid", "record")
        if choice not in ("record", "error"):
            self.complain("points.on_invalid", expected('"record" or "error"', choice))
        return str(choice)

    def load_files(self, grid: Grid) -> None:
        """Load each named file once, then the runtimes that these name."""
        for key in _LOADERS:
            section = "axes" if key in grid.axes else "fixed"
            for text in grid.values(key):
                if text is not None:
                    self.load_file(grid, f"{section}.{key}", key, text)
        for record in list(grid.objects.values()):
            runtime = getattr(record, "runtime", None)
            if runtime is not None:
                self.load_file(grid, f"runtime of {record.name}", "runtime", runtime)
        self.load_file(grid, "runtime", "runtime", IDEAL)

    def load_file(self, grid: Grid, place: str, key: str, text: str) -> None:
        if (key, text) not in grid.objects:
            try:
                grid.objects[key, text] = _LOADERS[key](text, self.folder)
            except ConfigError as error:
                for line in error.lines:
                    self.complain(place, line)
