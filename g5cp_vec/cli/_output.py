"""Tables and numbers as a person reads them. Imported by commands when they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from g5cp_vec.cli._words import say

if TYPE_CHECKING:
    from g5cp_vec.config.grid import Grid

# Rich wraps what is wider than the terminal; a file or a pipe has no width.
_UNBOUNDED = 10_000
_KIB, _MIB = 2**10, 2**20


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that prints texts as they are."""
    console = _Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED
    return console


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, n_left: int = 1) -> None:
    """Print a table; the first ``n_left`` columns are texts, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, header in enumerate(headers):
        is_text = position < n_left
        table.add_column(header, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    make_console().print(table)


def announce_notes(grid: Grid) -> None:
    """Say on stderr what was left out or assumed of a grid's models."""
    for note in grid.notes():
        say(f"note: {note}")


def announce_compilation() -> None:
    """Say on stderr that the first call takes long, if this is the first call."""
    from g5cp_vec.engine._jit import is_compiled

    if not is_compiled():
        say("compiling the kernels, once per installation (20 to 60 seconds)")


def seconds_text(seconds: float) -> str:
    """``1.234 s``, ``12.34 ms``, ``3.1 h``."""
    if seconds < 1:
        return f"{seconds * 1e3:.4g} ms"
    if seconds < 100:
        return f"{seconds:.4g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"


def bytes_text(n_bytes: float) -> str:
    """``12.3 GB`` (1e9 bytes)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.4g} {unit}"
    return f"{n_bytes:.0f} B"


def tokens_text(n_tokens: int) -> str:
    """``128K``, ``1M`` as grids write it; digits where it is not whole."""
    for unit, size in (("M", _MIB), ("K", _KIB)):
        if n_tokens and n_tokens % size == 0:
            return f"{n_tokens // size}{unit}"
    return str(n_tokens)
