"""The one way from a path to the text of a user's file, with one line about whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from g5cp_vec.errors import ConfigError

# What people and tools write by hand or by generator; measured tables and workloads may be long.
MOST_BYTES = 16 * 2**20
MOST_TABLE_BYTES = 2**30
_AT_ONCE = 2**24
_MOST_BITS = 14_000


def read_text(path: Path, what: str, *, most_bytes: int = MOST_BYTES, encoding: str = "utf-8") -> str:
    """Read a text file, whose size is bounded because a device has no end.

    Parameters
    ----------
    path : Path
    what : str
        What the file should be, with its article: ``"a TOML file"``.
    most_bytes : int
    encoding : str
        ``utf-8``, or ``utf-8-sig`` where a byte order mark may stand first.

    Raises
    ------
    ConfigError
        There is no such file, it cannot be read, is too long, or is no UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            pieces = [file.read(_AT_ONCE)]
            size = len(pieces[0])
            while pieces[-1] and size <= most_bytes:
                pieces.append(file.read(_AT_ONCE))
                size += len(pieces[-1])
        if size <= most_bytes:
            return b"".join(pieces).decode(encoding)
        problem = f"has more than {most_bytes} bytes"
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        problem = "is a directory"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start})"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except ValueError:  # a path that no file can have
        raise ConfigError(f"{str(path)!r}: no such file") from None
    raise ConfigError(f"{path}: {problem}, expected {what}")


def in_unicode(name: str) -> str:
    """Return the name of a file as data can hold it: bytes that are no UTF-8 as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def read_json_text(path: Path, text: str) -> Any:
    """Parse JSON; a key that stands twice in an object with different values is refused, for either could be meant."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError as error:  # JSONDecodeError, an integer of thousands of digits, `_object`
        problem = f"is not valid JSON: {' '.join(str(error).split())}"
    raise ConfigError(f"{path}: {problem}")


def is_endless(value: Any) -> bool:
    """Whether a parsed file holds an integer that Python does not write out in digits, as 0x… of thousands of them."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            return True
    return False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    contents = dict(pairs)
    if len(contents) < len(pairs):
        for key, value in pairs:
            if contents[key] != value:
                raise ValueError(f"key {key[:60]!r} stands twice with different values, expected one")
    return contents
