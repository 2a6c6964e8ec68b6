"""``g5cp-vec list``: the presets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import click

if TYPE_CHECKING:
    from g5cp_vec.config._files import Kind

# Columns of text that tables take.
_WIDTH = 112


@click.command("list", epilog="\b\nExample:\n  g5cp-vec list models")
@click.argument("kind", type=click.Choice(["models", "chips", "topologies"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, preset by preset.")
def command(kind: str, as_json: bool) -> None:
    """Show the presets of one kind with their numbers.

    Keys and units are those of a file of your own.
    """
    from g5cp_vec.cli._output import print_table
    from g5cp_vec.config._files import locate, preset_names, read_toml

    which = cast("Kind", kind)
    presets = {name: read_toml(locate(which, name)) for name in preset_names(which)}
    if as_json:
        click.echo(json.dumps(presets))
        return
    columns = {
        name: {key: _cell(value) for key, value in _flat(table) if key not in ("name", "source")}
        for name, table in presets.items()
    }
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    sections = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
    together = sorted(keys, key=lambda key: sections.index(key.rpartition(".")[0]))
    for names in _side_by_side(columns, max(map(len, keys))):
        rows = [(key, *(columns[name].get(key, "") for name in names)) for key in together]
        print_table(["", *names], [row for row in rows if any(row[1:])])


def _side_by_side(columns: dict[str, dict[str, str]], key_width: int) -> list[list[str]]:
    """Return the presets of each table: those of one kind together, and no more than fit beside one another."""
    tables: list[list[str]] = []
    kind, room = None, 0
    for name in sorted(columns, key=lambda name: (columns[name].get("kind", ""), name)):
        width = 3 + max(len(text) for text in (name, *columns[name].values()))
        if not tables or columns[name].get("kind") != kind or width > room:
            tables.append([])
            kind, room = columns[name].get("kind"), _WIDTH - key_width
        tables[-1].append(name)
        room -= width
    return tables


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the entries of nested tables, and of lists of tables, under dotted keys."""
    entries: list[tuple[str, Any]] = []
    for key, value in table.items():
        if key == "calibration":  # tables of their own, too long to show
            entries.append(("calibrated", value["fitted"]))
        elif isinstance(value, dict):
            entries += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            for place, entry in enumerate(value):
                entries += _flat(entry, f"{prefix}{key}[{place}].")
        else:
            entries.append((f"{prefix}{key}", value))
    return entries


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
