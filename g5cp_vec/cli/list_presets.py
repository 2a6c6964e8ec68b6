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
@click.argument("kind", type=click.Choice(["models", "chips", "topologies", "layouts"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, preset by preset.")
@click.option("--model", help="Of layouts: a preset or a file.")
@click.option("--n-chips", type=click.IntRange(1, 2**20), help="Of layouts: chips of one pipeline stage.")
@click.option("--cp-semantics", default="multiplicative", help="Of layouts: multiplicative (default) or orthogonal.")
def command(kind: str, as_json: bool, model: str | None, n_chips: int | None, cp_semantics: str) -> None:
    """Show presets with their numbers, or a model's legal layouts.

    Keys and units are those of a file of your own. Layouts are all (tp, pcp, dcp) that a model's heads allow on so many
    chips.
    """
    if kind == "layouts":
        _list_layouts(model, n_chips, cp_semantics, as_json=as_json)
        return
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


def _list_layouts(model: str | None, n_chips: int | None, semantics: str, *, as_json: bool) -> None:
    from g5cp_vec.analysis.layouts import legal_rows
    from g5cp_vec.cli._layouts import print_legal_of
    from g5cp_vec.config.context import SEMANTICS
    from g5cp_vec.config.model import load_model
    from g5cp_vec.errors import ConfigError

    if model is None or n_chips is None:
        raise ConfigError("list layouts: expected --model and --n-chips, like --model qwen3-235b-a22b --n-chips 16")
    if semantics not in SEMANTICS:
        raise ConfigError(f"--cp-semantics: expected one of {', '.join(SEMANTICS)}, got {semantics!r}")
    loaded = load_model(model)
    if as_json:
        click.echo(json.dumps([row[:3] for row in legal_rows(loaded, n_chips, semantics)]))
        return
    print_legal_of(loaded, n_chips, semantics)


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
