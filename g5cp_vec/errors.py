"""Exceptions of the package: what the user wrote, what cannot be, what the engine could not do.

::

    G5cpError
    ├── ConfigError       a file or option is wrong; each line names file and key
    ├── InfeasibleError   a combination that cannot be: an ``invalid`` row in a sweep, a refusal in ``run``
    └── SimulationError   the engine stopped: a malformed graph or a defect of ours
"""

from __future__ import annotations

from collections.abc import Sequence


class G5cpError(Exception):
    """Root of every error raised on purpose by this package."""


class ConfigError(G5cpError):
    """A user's file or option is wrong.

    Parameters
    ----------
    lines : sequence of str
        One complaint a line: what, where (file and key), what was expected, what to do.
    """

    def __init__(self, lines: Sequence[str] | str) -> None:
        self.lines = [lines] if isinstance(lines, str) else list(lines)
        super().__init__("\n".join(self.lines))


class InfeasibleError(G5cpError):
    """A combination of valid values that cannot be deployed; the message is the ``reason`` column."""


class SimulationError(G5cpError):
    """The engine returned a failure status."""
