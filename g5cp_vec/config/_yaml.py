"""YAML as plain data: no tags, no key twice, aliases within bounds, and one line about whatever else is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from g5cp_vec.config._text import is_endless, read_text
from g5cp_vec.errors import ConfigError

_MOST_VALUES = 1 << 21
_DEEPEST = 64
_EXPONENT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")


def is_yaml(path: Path) -> bool:
    """Whether a file's name says that it is YAML."""
    return path.suffix.lower() in (".yaml", ".yml")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a table.

    Raises
    ------
    ConfigError
        Not readable, not YAML, not a table, or YAML that means more than it shows.
    """
    contents = _parsed(path, read_text(path, "a YAML file"))
    if not isinstance(contents, dict):
        raise ConfigError(f"{path}: holds no keys, expected a YAML table")
    if is_endless(contents):
        raise ConfigError(f"{path}: holds an integer of thousands of digits")
    return contents


def _parsed(path: Path, text: str) -> Any:
    import yaml  # read by few, and slow to import

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]
        """Like the safe one, which takes the last of several equal keys, and keys that are no text."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            known = set[str]()
            for key, _ in node.value:
                if key.tag != "tag:yaml.org,2002:str":
                    raise yaml.MarkedYAMLError(problem="a key that is no text", problem_mark=key.start_mark)
                if key.value in known:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
                known.add(key.value)
            return super().construct_mapping(node, deep=deep)

    # As in JSON and YAML 1.2; to YAML 1.1 a number without a point is a text.
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))
    try:
        _check_events(yaml, yaml.parse(text, Loader=base))
        return yaml.load(text, Loader=Loader)  # noqa: S506 (a safe one)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        problem = " ".join(str(error.problem or error.context).split())
        raise ConfigError(f"{path}: is not YAML that can be read: {problem}{where}") from None
    except (yaml.YAMLError, ValueError) as error:  # a character that none may have, a date that is none
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None


def _check_events(yaml: Any, events: Any) -> None:
    """Refuse nesting that nobody writes, and aliases by which a short file stands for a long one, or for itself."""
    sizes = dict[str, int]()  # values that an anchor stands for, when that is known
    open_ = [("", 0)]  # anchor and values of each collection being read
    for event in events:
        problem, n_values = None, 0
        if isinstance(event, yaml.AliasEvent):
            n_values = sizes.get(event.anchor, 0)
            problem = None if n_values else f"alias *{event.anchor} stands inside what it stands for, or before it"
        elif isinstance(event, yaml.ScalarEvent):
            n_values = 1
            sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, 1))
            sizes.pop(event.anchor, None)
            problem = "is nested too deeply" if len(open_) > _DEEPEST else None
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, n_values = open_.pop()
            sizes[anchor] = n_values
        open_[-1] = (open_[-1][0], open_[-1][1] + n_values)
        if open_[-1][1] > _MOST_VALUES:
            problem = f"more than {_MOST_VALUES} values, aliases written out"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
