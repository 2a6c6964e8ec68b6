"""The one place where exceptions become messages and exit statuses."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click

from g5cp_vec.errors import ConfigError, InfeasibleError, SimulationError

INPUT_IS_WRONG = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count
PIPE_CLOSED = 141  # 128 + SIGPIPE


class ErrorSeam(click.Group):
    """A group of commands whose failures are lines on stderr, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command chosen."""
        try:
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
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            # The reader has what it wanted; what is still buffered must not complain when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(PIPE_CLOSED)
        return value


def _leave(ctx: click.Context, status: int, *lines: str) -> NoReturn:
    for line in lines:
        click.echo(f"error: {line}", err=True)
    ctx.exit(status)
