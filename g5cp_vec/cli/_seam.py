"""The one place where exceptions become messages and exit statuses."""

from __future__ import annotations

import _thread
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TextIO

import click

from g5cp_vec.cli._words import say, signs_of_life
from g5cp_vec.errors import ConfigError, InfeasibleError, SimulationError

INPUT_IS_WRONG = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
PIPE_CLOSED = 141  # 128 + SIGPIPE


class ErrorSeam(click.Group):
    """A group of commands whose failures are lines on stderr, never a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the words before the command."""
        _prepare_streams()
        with _one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command chosen."""
        try:
            with _termination_interrupts(), _no_interrupt_is_lost(), signs_of_life(), _one_line():
                value = super().invoke(ctx)
                sys.stdout.flush()
        except ConfigError as error:
            _leave(ctx, INPUT_IS_WRONG, *error.lines)
        except InfeasibleError as error:
            _leave(ctx, INPUT_IS_WRONG, str(error))
        except SimulationError as error:
            _leave(ctx, INPUT_IS_WRONG, f"{error}; this is a defect of g5cp-vec: please report it with the input")
        except MemoryError:
            _leave(ctx, INPUT_IS_WRONG, "not enough memory; take fewer chips, or fewer points at a time")
        except KeyboardInterrupt as interrupt:
            _leave_interrupted(ctx, str(interrupt) or "interrupted")
        except BrokenPipeError:
            # The reader has what it wanted; what is still buffered must not complain when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(PIPE_CLOSED)
        except OSError as error:
            _leave(ctx, INPUT_IS_WRONG, f"{error.filename or 'output'}: {error.strerror or error}")
        return value


def _leave_interrupted(ctx: click.Context, line: str) -> NoReturn:
    """Say what an interruption left, and leave; a second one does not interrupt that."""
    previous = {number: _try_handler(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    say(line)
    for number, handler in previous.items():
        if handler is not None:
            _try_handler(number, handler)
    ctx.exit(INTERRUPTED)


@contextmanager
def _one_line() -> Iterator[None]:
    """Say what is wrong with a command's words in one line; click says it in three."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.ClickException as error:
        # Choices are listed line by line.
        message = " ".join(error.format_message().split()).rstrip(".")
        ctx = getattr(error, "ctx", None)
        hint = "" if ctx is None else f"; see {ctx.command_path} --help"
        say(message + hint, prefix="error: ")
        raise click.exceptions.Exit(INPUT_IS_WRONG) from None


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """Take SIGTERM, by which batch systems and containers end a program, for an interruption from the keyboard."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = _try_handler(signal.SIGTERM, interrupt) if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else None
    try:
        yield
    finally:
        if previous is not None:
            _try_handler(signal.SIGTERM, previous)


@contextmanager
def _no_interrupt_is_lost() -> Iterator[None]:
    """Interrupt once more where an interruption fell into a call from C, out of which no exception comes."""
    previous = sys.unraisablehook

    def again(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.interrupt_main()
        else:
            previous(unraisable)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = previous


def _nowhere() -> TextIO:
    return io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8")


def _try_handler(number: int, handler: Any) -> Any:
    try:
        return signal.signal(number, handler)
    except ValueError:  # only the main thread may, and this is another
        return None


def _leave(ctx: click.Context, status: int, *lines: str) -> NoReturn:
    say(*lines, prefix="error: ")
    ctx.exit(status)


def _prepare_streams() -> None:
    """Write characters that a terminal's encoding lacks as escapes, and to a closed stream nothing."""
    sys.stdout, sys.stderr = (stream or _nowhere() for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
