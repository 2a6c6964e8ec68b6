"""From a path to the text part of a ``config.json``, and to its keys one by one, each checked as it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from g5cp_vec.config._files import describe, did_you_mean
from g5cp_vec.config._text import read_json_text, read_text
from g5cp_vec.errors import ConfigError

FILE = "config.json"
# Beyond any model; keeps what hostile files ask for within a machine's reach.
MOST_LAYERS = 10_000
_MOST = 2**31 - 1

# One thing under several names: those of an attribute_map, and those of old and new transformers.
_ALSO = {
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_local_experts": ("num_experts",),
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("experts_per_token",),
    "layer_types": ("layers_block_type",),
    "dtype": ("torch_dtype",),
    "no_rope_layer_interval": ("nope_layer_interval",),
    "head_dim": ("attention_head_dim",),
    "n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "use_conv_bias": ("mamba_conv_bias",),
}


def config_path(path: Path) -> Path:
    """Return the ``config.json`` that a path means: itself, or the one in it."""
    if not path.is_dir():
        return path
    if not (path / FILE).is_file():
        raise ConfigError(f"{path}: is a directory without a {FILE}, expected a Hugging Face checkpoint or a TOML file")
    return path / FILE


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or say in one line why that is impossible."""
    contents = read_json_text(path, read_text(path, f"JSON, the {FILE} of a model", encoding="utf-8-sig"))
    if isinstance(contents, dict):
        return contents
    raise ConfigError(f"{path}: expected a JSON object, got {shown(contents)}")


def shown(value: object) -> str:
    """Return a value as JSON writes it, on one line and not too long."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return describe(value)


class Keys:
    """The keys of one object of a file, with the defaults of the configuration class that would read it.

    Parameters
    ----------
    path : Path
        The file, for complaints.
    values : mapping
        What the file says.
    place : str
        Where in the file the object stands, such as ``"text_config."``.
    defaults : mapping
        Values of absent keys; a key that is in neither is missing.
    """

    def __init__(
        self, path: Path, values: Mapping[str, Any], place: str = "", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.values, self.place = path, values, place
        self.defaults = defaults or {}
        self.assumed: dict[str, Any] = {}
        self.read: set[str] = set()

    def refuse(self, key: str, message: str) -> NoReturn:
        """Complain about a key, in one line."""
        raise ConfigError(f"{self.path}: {(self.place + key).rstrip('.')}: {message}")

    def wrong(self, key: str, expected: str) -> NoReturn:
        """Complain about the value of a key."""
        self.refuse(self.written(key), f"expected {expected}, got {shown(self.raw(key))}")

    def written(self, key: str) -> str:
        """Return the name that the file has a key under; two that contradict each other are refused."""
        self.read |= {key, *_ALSO.get(key, ())}
        names = [name for name in (key, *_ALSO.get(key, ())) if name in self.values]
        said = [name for name in names if self.values[name] is not None]
        for other in said[1:]:
            if self.values[other] != self.values[said[0]]:
                first = f"{said[0]} = {shown(self.values[said[0]])}"
                self.refuse(other, f"{shown(self.values[other])} contradicts {first}; they mean the same")
        return (said or names or [key])[0]

    def says(self, key: str) -> bool:
        """Whether the file itself has the key, with another value than null."""
        return self.values.get(self.written(key)) is not None

    def raw(self, key: str) -> Any:
        """Return a value as it is, the default where the key is absent; null and nothing are None."""
        name = self.written(key)
        if name in self.values:
            return self.values[name]
        value = self.defaults.get(key)
        if value is not None:
            self.assumed[key] = value
        return value

    def count(self, key: str, *, least: int = 1, most: int = _MOST, null: int | None = None) -> int:
        """Return an integer; `null` where the file or the default says null and that has a meaning."""
        value = self.raw(key)
        if value is None and null is not None:
            return null
        if value is None and self.written(key) not in self.values:
            self.refuse(key, "missing")
        if type(value) is not int or not least <= value <= most:  # true is no integer
            self.wrong(key, f"an integer from {least} to {most}")
        return value

    def optional(self, key: str, *, least: int = 1) -> int | None:
        """Return an integer, None for null."""
        return None if self.raw(key) is None else self.count(key, least=least)

    def flag(self, key: str) -> bool:
        """Return a truth value; null is false."""
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            self.wrong(key, "true or false")
        return bool(value)

    def fraction(self, key: str) -> float:
        """Return a number from 0 to 1."""
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.wrong(key, "a number from 0 to 1")
        return float(value)

    def text(self, key: str) -> str:
        """Return a text."""
        value = self.raw(key)
        if not isinstance(value, str):
            self.wrong(key, "a text")
        return value

    def listing(self, key: str, n: int, known: Collection[Any]) -> list[Any] | None:
        """Return a list with one entry a layer, each of them known; None where there is no such list."""
        entries = self.raw(key)
        if entries is None:
            return None
        if not isinstance(entries, list) or len(entries) != n:
            self.wrong(key, f"a list of {n}, one entry a layer")
        for i, entry in enumerate(entries):
            if isinstance(entry, bool) or not isinstance(entry, str | int) or entry not in known:
                words = ", ".join(map(describe, known))
                hint = did_you_mean(entry, [k for k in known if isinstance(k, str)]) if isinstance(entry, str) else ""
                self.refuse(
                    f"{self.written(key)}[{i}]", f"{shown(entry)} is not modelled, expected one of {words}{hint}"
                )
        return entries

    def table(self, key: str) -> Keys | None:
        """Return the keys of an object within, None where there is none."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.wrong(key, "an object")
        return Keys(self.path, value, f"{self.place}{key}.")
