"""From a name or a path to a checked object, or to one line for each thing that is wrong.

A name is looked up among the presets first; anything else is a path, relative to the folder of the file that names it,
then to the working directory. A complaint reads ``FILE: key.path: expected …, got …``.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from g5cp_vec.config._record import Record
from g5cp_vec.config._text import in_unicode, is_endless, read_text
from g5cp_vec.config._units import to_si, written_key, written_quantity
from g5cp_vec.errors import ConfigError

Kind = Literal["models", "chips", "topologies", "runtimes"]
RecordT = TypeVar("RecordT", bound=Record)

PRESETS = Path(__file__).parent / "presets"
_SINGULAR = {"models": "model", "chips": "chip", "topologies": "topology", "runtimes": "runtime"}
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN_CHARACTERS = 60


def preset_names(kind: Kind) -> list[str]:
    """Return the names of the presets of one kind, sorted."""
    return sorted(path.stem for path in (PRESETS / kind).glob("*.toml"))


def describe(value: object) -> str:
    """Return `value` as a user would write it, on one line and not too long."""
    if value is None:
        return "null"
    try:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:  # Python does not write out integers of thousands of digits
        return "an integer of thousands of digits"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known word, case aside, or nothing."""
    folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), folded, n=1)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the complaint about a key that nobody reads."""
    names = list(known)
    hint = did_you_mean(key, names) or f"; known: {', '.join(names)}"
    return f"unknown key {describe(key)}{hint}"


def locate(kind: Kind, text: str, base: Path | None = None) -> Path:
    """Return the file behind a preset name or a path.

    Parameters
    ----------
    kind : str
        Which presets to look among.
    text : str
        What the user wrote.
    base : Path, optional
        Folder of the file that says `text`; tried before the working directory.

    Raises
    ------
    ConfigError
        Neither a preset nor a file.
    """
    names = preset_names(kind)
    if text in names:
        return PRESETS / kind / f"{text}.toml"
    for folder in (base, Path()):
        try:
            if folder is not None and text and (folder / text).exists():
                return folder / text
        except (OSError, ValueError):  # a name no file can have: too long, or with a NUL in it
            continue
    what = _SINGULAR[kind]
    if text.endswith((".toml", ".json", ".yaml", ".yml")) or "/" in text:
        raise ConfigError(f"{describe(text)}: no such {what} file")
    hint = did_you_mean(text, names)
    raise ConfigError(f"unknown {what} {describe(text)}{hint or ';'} presets: {', '.join(names)}; or give a path")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say in one line why that is impossible."""
    try:
        table = tomllib.loads(read_text(path, "a TOML file", encoding="utf-8-sig"))
        if not is_endless(table):
            return table
        problem = "holds an integer of thousands of digits"
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError as error:  # TOMLDecodeError, an integer of thousands of digits
        problem = f"is not valid TOML: {' '.join(str(error).split())}"
    raise ConfigError(f"{path}: {problem}")


def read_record(cls: type[RecordT], path: Path, table: Mapping[str, Any] | None = None) -> RecordT:
    """Read one file into one record.

    Parameters
    ----------
    cls : type of Record
        The schema, in SI units.
    path : Path
        The file; its stem is the default ``name``.
    table : mapping, optional
        The file's contents where the caller has read them already, in the file's units.

    Raises
    ------
    ConfigError
        With one line for every complaint.
    """
    contents = {"name": in_unicode(path.stem), **(read_toml(path) if table is None else table)}
    # A key in SI units is not part of the format; accepting it as well would give one quantity two names.
    foreign: list[tuple[str | int, ...]] = []
    known = _without_foreign(contents, (), foreign)
    lines = []
    for place in foreign:
        fields = _written_fields(_schema_at(cls, place[:-1]) or cls)
        lines.append(f"{path}: {_dotted(place)}: {unknown_key(str(place[-1]), fields)}")
    try:
        record = cls.model_validate(to_si(known))
    except ValidationError as error:
        lines += [f"{path}: {line}" for line in _complaints(cls, contents, error)]
    if lines:
        raise ConfigError(lines)
    return record


def anchored_runtime(text: str | None, path: Path) -> str | None:
    """Return a file's ``runtime`` entry such that it can be looked up from any folder."""
    if text is None or text in preset_names("runtimes"):
        return text
    beside = path.parent / text
    return str(beside.resolve()) if beside.is_file() else text


def _without_foreign(value: Any, place: tuple[str | int, ...], foreign: list[tuple[str | int, ...]]) -> Any:
    """Return a table without the keys in SI units, at any depth; their places are added to `foreign`."""
    if isinstance(value, list):
        return [_without_foreign(entry, (*place, i), foreign) for i, entry in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    foreign += [(*place, key) for key in value if written_key(key) != key]
    return {
        key: _without_foreign(entry, (*place, key), foreign) for key, entry in value.items() if written_key(key) == key
    }


def _written_fields(cls: type[BaseModel]) -> list[str]:
    return [written_key(field.alias or name) for name, field in cls.model_fields.items()]


def _dotted(parts: Iterable[str | int]) -> str:
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += ("." if path else "") + (part if _BARE_KEY.fullmatch(part) else repr(part))
    return path


def _schema_at(cls: type[BaseModel], location: Iterable[str | int]) -> type[BaseModel] | None:
    """Follow a complaint's location into the nested schema it stands in."""
    current: type[BaseModel] | None = cls
    for part in location:
        if isinstance(part, int):  # an entry of a list has the schema that the list has
            continue
        field = current.model_fields.get(part) if current else None
        choices = () if field is None else (field.annotation, *typing.get_args(field.annotation))
        current = next((c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return current


def _entry(value: Any, key: str | int) -> Any:
    """Return an entry of a table or a list; None where there is none."""
    if isinstance(value, Mapping):
        return value.get(key)
    return value[key] if isinstance(value, list) and isinstance(key, int) and key < len(value) else None


def _in_written_units(expectation: str, location: Iterable[str | int], limits: Mapping[str, Any]) -> str:
    """Return an expectation with its limits in the unit that the file's key has."""
    name = next((part for part in location if isinstance(part, str) and written_key(part) != part), "")
    for limit in limits.values():
        if name and isinstance(limit, int | float) and limit:
            expectation = expectation.replace(str(limit), f"{written_quantity(name, limit):g}")
    return expectation


def _complaints(cls: type[BaseModel], contents: Mapping[str, Any], error: ValidationError) -> list[str]:
    """Turn a schema's errors into lines that speak of the keys and values as they were written."""
    lines = []
    for problem in error.errors(include_url=False):
        location = problem["loc"]
        keys = [written_key(part) if isinstance(part, str) else part for part in location if part != "[key]"]
        got: Any = contents
        for key in keys:
            got = _entry(got, key)
        if problem["type"] == "missing":
            message = "missing"
        elif problem["type"] == "extra_forbidden":
            schema = _schema_at(cls, location[:-1]) or cls
            message = unknown_key(str(keys[-1]), _written_fields(schema))
        elif problem["type"] == "value_error":  # raised by our own checks, which say what they mean
            message = str(problem["ctx"]["error"]).replace(describe(problem["input"]), describe(got))
        elif problem["type"] == "model_type":
            message = f"expected a table, got {describe(got)}"
        else:
            # Whole bytes come from any number of gigabytes.
            integer = "an integer" if keys == list(location) else "a number"
            expectation = problem["msg"].removeprefix("Input should be ").replace("a valid integer", integer)
            expectation = _in_written_units(expectation, location, problem.get("ctx", {}))
            message = f"expected {expectation.replace('valid ', '')}"
            message += f", got {describe(location[-2] if '[key]' in location else got)}"
        place = _dotted(keys)
        lines.append(f"{place}: {message}" if place else message)
    return lines
