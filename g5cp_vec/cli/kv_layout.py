"""``g5cp-vec kv-layout``: where tokens live when a context is sharded, and how a batch is split over ranks."""

from __future__ import annotations

import click

_CONTEXT_OPTIONS = ("context_len", "block_size", "kv_shards", "interleave")
_SPLIT_OPTIONS = ("tokens", "decodes", "pcp", "padded", "unpadded")
_DEFAULTS = {"block_size": "128", "interleave": "1", "decodes": "0"}


@click.command(
    "kv-layout",
    epilog="\b\nExample:\n  g5cp-vec kv-layout --context-len 1101 --block-size 128 --kv-shards 4 --interleave 8"
    "\n  g5cp-vec kv-layout --split --tokens 1,5,8 --decodes 1 --pcp 2",
)
@click.option("--context-len", metavar="N", help="Tokens of the context, like 1000 or 128K.")
@click.option("--block-size", metavar="N", help="Tokens of a block on one rank.  [default: 128]")
@click.option("--kv-shards", metavar="N", help="Ranks that share the context.")
@click.option("--interleave", metavar="N", help="Tokens dealt to a rank before the next one's turn.  [default: 1]")
@click.option("--split", is_flag=True, help="Show the head-tail split of a batch instead.")
@click.option("--tokens", metavar="N,N,…", help="New tokens of each request, decode requests first.")
@click.option("--decodes", metavar="N", help="The first N requests are decode requests.  [default: 0]")
@click.option("--pcp", metavar="N", help="Ranks of prefill context parallelism.")
@click.option("--padded", is_flag=True, help="Show only the padded form of the split.")
@click.option("--unpadded", is_flag=True, help="Show only the virtual batch, without pads.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV: a row per token, or with --split a row per rank.")
@click.option("--long-cells", is_flag=True, help="With --csv --split: write cells of any length.")
def command(split: bool, as_csv: bool, long_cells: bool, **options: str | bool | None) -> None:
    """Show where each token lives under context parallelism.

    Either the layout of one context in a KV cache that is sharded over ranks, or, with --split, which new tokens of a
    batch each prefill rank computes and how gathered rows are put back into order. CSV cells longer than 131072
    characters, which readers refuse, are left empty, which is said on the error stream; --long-cells writes them.
    """
    from g5cp_vec.cli import _kv_layout_output as output

    _refuse_strays(split, options)
    if long_cells and not (split and as_csv):
        from g5cp_vec.errors import ConfigError

        raise ConfigError("--long-cells: only with --split --csv; add them, or leave it out")
    if split:
        from g5cp_vec.mapping.head_tail import split_batch

        tokens = [_number("tokens", text) for text in str(_given(options, "tokens")).split(",")]
        batch = split_batch(
            tokens, _number("pcp", _given(options, "pcp")), _number("decodes", _given(options, "decodes"))
        )
        forms = output.chosen_forms(padded=bool(options["padded"]), unpadded=bool(options["unpadded"]))
        if as_csv:
            output.print_split_csv(batch, forms, long_cells=long_cells)
        else:
            output.print_split(batch, forms)
    else:
        from g5cp_vec.mapping.kv_layout import KVLayout

        context_len = _number("context_len", _given(options, "context_len"))
        names = ("kv_shards", "block_size", "interleave")
        layout = KVLayout(**{name: _number(name, _given(options, name)) for name in names})
        (output.print_context_csv if as_csv else output.print_context)(layout, context_len)


def _refuse_strays(split: bool, options: dict[str, str | bool | None]) -> None:
    """Refuse options of the other question."""
    from g5cp_vec.errors import ConfigError

    strays = [
        _option(name) for name in (_CONTEXT_OPTIONS if split else _SPLIT_OPTIONS) if options[name] not in (None, False)
    ]
    if strays and split:
        raise ConfigError(f"{', '.join(strays)}: not with --split, which is about a batch; leave one or the other out")
    if strays:
        raise ConfigError(f"{', '.join(strays)}: only with --split; add it, or leave {strays[0]} out")
    if options["padded"] and options["unpadded"]:
        raise ConfigError("--padded, --unpadded: give one of them, or neither for both forms")


def _given(options: dict[str, str | bool | None], name: str) -> str:
    """Return what was written for an option, or its default."""
    from g5cp_vec.errors import ConfigError

    value = _DEFAULTS.get(name) if options[name] is None else options[name]
    if value is not None:
        return str(value)
    hint = ", or --split for the split of a batch" if name == "context_len" else ""
    raise ConfigError(f"{_option(name)}: missing, expected a number{hint}; see g5cp-vec kv-layout --help")


def _number(name: str, text: str) -> int:
    """Read an option as keys of a grid are read."""
    from g5cp_vec.config._keys import KEYS, expected
    from g5cp_vec.errors import ConfigError

    digits = text.strip()
    try:
        if name in ("context_len", "tokens"):
            return int(KEYS["seq_len"].read(digits))
        number = int(digits) if digits.isascii() and digits.isdigit() else digits
        if name == "decodes":
            if isinstance(number, int):
                return number
            raise expected("an integer from 0 to the number of requests", number)
        return int(KEYS["cp"].read(number))
    except ValueError as error:
        raise ConfigError(f"{_option(name)}: {error}") from None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
