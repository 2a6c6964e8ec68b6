"""The one place where exceptions become messages and exit statuses."""

from __future__ import annotations

import _thread
import io
import os
import signal
import sys
import threading
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
_AGAIN_AFTER_S = 0.05


class ErrorSeam(click.Group):
    """A group of commands whose failures are lines on stderr, never a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the words before the command."""
        _prepare_streams()
        try:
            with _one_line():
                return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            say("interrupted")
            raise click.exceptions.Exit(INTERRUPTED) from None

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
    """Say in one line what is wrong with a command's words, for which click takes three, or with its output."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        say(f"{error.filename or 'output'}: {error.strerror or error}", prefix="error: ")
        raise click.exceptions.Exit(INPUT_IS_WRONG) from None
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


def _interrupt_main() -> None:
    """Send the main thread a signal, which ends a system call that it waits in."""
    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))]
    if handled and hasattr(signal, "pthread_kill") and (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, handled[0])
    else:
        _thread.interrupt_main()


@contextmanager
def _no_interrupt_is_lost() -> Iterator[None]:
    """Interrupt where an interruption fell into a call from C, out of which no exception comes.

    What goes on is interrupted once more, and what fails because of it, as a compiler whose callback did nothing, is
    taken for interrupted.
    """
    again = threading.Timer(_AGAIN_AFTER_S, _interrupt_main)
    previous = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous(unraisable)
        elif again.ident is None:
            again.start()

    sys.unraisablehook = hook
    try:
        yield
    except click.exceptions.Exit:
        raise
    except Exception:
        if again.ident is not None:
            raise KeyboardInterrupt from None
        raise
    finally:
        sys.unraisablehook = previous
        again.cancel()


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
