"""How far a sweep is: a bar on a terminal, lines elsewhere, nothing with --quiet. All of it on stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from g5cp_vec.cli._output import make_console, seconds_text
from g5cp_vec.cli._words import SILENCE_S, doing, not_silent, say


class Progress:
    """Counts rows, shows nothing.

    Attributes
    ----------
    n_rows, n_resumed, n_done : int
        All rows, those found finished, those finished since.
    """

    def __init__(self) -> None:
        self.n_rows = self.n_resumed = self.n_done = 0
        self.started_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @property
    def elapsed_s(self) -> float:
        """Seconds since rows began to be computed."""
        return time.monotonic() - self.started_s

    @property
    def rows_per_s(self) -> float:
        """Mean rate so far; rows found finished do not count."""
        return self.n_done / max(self.elapsed_s, 1e-9)

    def begin(self, n_rows: int, headline: str) -> None:
        """Rows are about to be computed."""
        doing("simulating")
        self.n_rows, self.started_s = n_rows, time.monotonic()

    def resumed(self, n_rows: int) -> None:
        """Rows were found finished."""
        self.n_resumed += n_rows

    def damaged(self, path: Path, problem: str) -> None:
        """Note that a part is there, but has to be computed again."""

    def advance(self, n_rows: int) -> None:
        """More rows were computed."""
        not_silent()
        self.n_done += n_rows


class Lines(Progress):
    """A line at the start, one every ten seconds, one at the end.

    The rate shown counts from the first rows on, which may have waited for compilation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_s = self._first_s = 0.0
        self._n_first = 0

    def begin(self, n_rows: int, headline: str) -> None:
        """Print what is to be done."""
        super().begin(n_rows, headline)
        self._last_s = self.started_s
        say(headline)

    def damaged(self, path: Path, problem: str) -> None:
        """Say so."""
        _say_damaged(path, problem)

    def advance(self, n_rows: int) -> None:
        """Print a line if the last one is old, or if this was the last row."""
        super().advance(n_rows)
        now_s, done = time.monotonic(), self.n_resumed + self.n_done
        if self._n_first == 0:
            self._n_first, self._first_s = self.n_done, now_s
        if now_s - self._last_s < SILENCE_S and done < self.n_rows:
            return
        self._last_s = now_s
        line = f"{done}/{self.n_rows} rows"
        if self.n_resumed:
            line += f" ({self.n_resumed} found finished)"
        if self.n_done > self._n_first:
            rate = (self.n_done - self._n_first) / max(now_s - self._first_s, 1e-9)
            line += f", {rate:.1f} rows/s"
            if done < self.n_rows:
                line += f", about {seconds_text((self.n_rows - done) / rate)} left"
        say(line)


def _say_damaged(path: Path, problem: str) -> None:
    say(f"{path}: {problem}; it is computed again")


class _RowsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0.0:,.1f} rows/s")


class Bar(Progress):
    """A bar with rows done, rows/s and time left."""

    def __init__(self) -> None:
        super().__init__()
        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), _RowsPerSecond(), TimeRemainingColumn())
        self._bar = RichProgress(*columns, console=make_console(stderr=True))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, n_rows: int, headline: str) -> None:
        """Show the bar."""
        super().begin(n_rows, headline)
        self._bar.console.print(headline)
        self._task = self._bar.add_task("rows", total=n_rows)
        self._bar.start()

    def resumed(self, n_rows: int) -> None:
        """Shorten the bar: it shows what is left to compute."""
        super().resumed(n_rows)
        self._bar.update(self._task, total=self.n_rows - self.n_resumed)

    def damaged(self, path: Path, problem: str) -> None:
        """Say so."""
        _say_damaged(path, problem)

    def advance(self, n_rows: int) -> None:
        """Move the bar."""
        super().advance(n_rows)
        self._bar.advance(self._task, n_rows)


def make_progress(*, quiet: bool) -> Progress:
    """Return the display that suits stderr."""
    if quiet:
        return Progress()
    return Bar() if sys.stderr.isatty() else Lines()
