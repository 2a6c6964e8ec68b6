"""``g5cp-vec list``: the presets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import click

if TYPE_CHECKING:
    from g5cp_vec.config._files import Kind


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
    columns = {name: dict(_flat(table)) for name, table in presets.items()}
    keys = dict.fromkeys(key for column in columns.values() for key in column if key not in ("name", "source"))
    sections = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
    together = sorted(keys, key=lambda key: sections.index(key.rpartition(".")[0]))
    print_table(["", *columns], [(key, *(_cell(column.get(key)) for column in columns.values())) for key in together])


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the entries of nested tables under dotted keys."""
    entries: list[tuple[str, Any]] = []
    for key, value in table.items():
        entries += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return entries


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
