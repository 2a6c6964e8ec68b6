"""The only place where an engine status becomes a sentence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from g5cp_vec.engine.arrays import ERR_CYCLE, ERR_NO_PROGRESS, ERR_NOT_FINITE, OK
from g5cp_vec.errors import ConfigError, SimulationError


def raise_for_status(status: int, info: NDArray[np.int64], source: str) -> None:
    """Raise what an engine status means; do nothing on OK.

    Raises
    ------
    ConfigError
        The graph has a cycle, or its times exceed what a float can hold: the input is to be changed.
    SimulationError
        The loop made no progress, which no valid input may cause.
    """
    op = int(info[0])
    if status == OK:
        return
    if status == ERR_CYCLE:
        raise ConfigError(f"{source}: deps: a cycle: ops[{op}] waits for itself; remove one dependency of the cycle")
    if status == ERR_NOT_FINITE:
        raise ConfigError(f"{source}: ops[{op}]: its end overflows; use smaller durations or larger bandwidths")
    if status == ERR_NO_PROGRESS:
        raise SimulationError(f"{source}: ops[{op}]: the simulation makes no progress")
    raise SimulationError(f"{source}: unknown engine status {status}")
