"""What is said on stderr: lines of bounded length, and a sign of life in every long silence. Imports nothing heavy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

SILENCE_S = 10.0
# What and where stand at the beginning of a complaint, what to do at its end: what is cut lies between.
MOST_CHARACTERS, _LAST_CHARACTERS = 600, 200
MOST_LINES = 20


class _Voice:
    """When something was said last, what is being done, and whether nothing but errors may be said."""

    spoken_s = 0.0
    doing = "working"
    is_quiet = False


def one_line(text: str) -> str:
    """Return a text with what cannot be printed, like a line break in a file's name, escaped; its middle left out."""
    if len(text) > 2 * MOST_CHARACTERS:  # what is left out need not be escaped
        text = f"{text[:MOST_CHARACTERS]} … {text[-MOST_CHARACTERS:]}"
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(line) <= MOST_CHARACTERS:
        return line
    return f"{line[: MOST_CHARACTERS - _LAST_CHARACTERS - 3]} … {line[-_LAST_CHARACTERS:]}"


def say(*texts: str, prefix: str = "") -> None:
    """Print lines on stderr, the first of them where there are very many."""
    not_silent()
    for text in texts[:MOST_LINES]:
        click.echo(prefix + one_line(text), err=True)
    if len(texts) > MOST_LINES:
        click.echo(f"{prefix}and {len(texts) - MOST_LINES} more like these", err=True)


def doing(what: str, *, quiet: bool | None = None) -> None:
    """Note what a command begins to do, to be said if it takes long; ``quiet`` commands say nothing but errors."""
    _Voice.doing, _Voice.is_quiet = what, _Voice.is_quiet if quiet is None else quiet


def not_silent() -> None:
    """Note that something was shown in another way."""
    _Voice.spoken_s = time.monotonic()


@contextmanager
def signs_of_life() -> Iterator[None]:
    """Say every ten seconds, unless something else was said, what is being done and for how long."""
    started_s = _Voice.spoken_s = time.monotonic()
    doing("working", quiet=False)
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(max(0.01, _Voice.spoken_s + SILENCE_S - time.monotonic())):
            now_s = time.monotonic()
            if now_s < _Voice.spoken_s + SILENCE_S:
                continue
            _Voice.spoken_s = now_s
            if not _Voice.is_quiet:
                with suppress(OSError, ValueError):  # nobody listens any more
                    click.echo(f"still {_Voice.doing}, {now_s - started_s:.0f} s so far", err=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class UserPath(click.Path):
    """A path as a user writes one: not an empty text, which would be the folder one is in."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse an empty text."""
        if value == "":
            self.fail("expected a path, got an empty text", param, ctx)
        return super().convert(value, param, ctx)
