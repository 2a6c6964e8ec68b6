"""Systems that published tables hold besides the presets: their rows help to fit chips that share kernels with them.

Dense peaks (TFLOP/s: bf16, fp8, fp4) and memory bandwidth (TB/s) as stated beside the tables of NVIDIA's AIConfigurator
0.12.0 (vendor figures). An element type without a unit runs at the bf16 rate.
"""

from __future__ import annotations

from collections.abc import Mapping

from g5cp_vec.calibration.fit import Machine
from g5cp_vec.config._files import preset_names
from g5cp_vec.config.chip import Chip, load_chip

_PEERS = {
    "b60": ({"bf16": 98e12}, 0.456e12),
    "l40s": ({"bf16": 362e12, "fp8": 733e12}, 0.864e12),
}


def system_of(chip: Chip) -> str:
    """Return a chip's name as tables spell it."""
    return chip.name.replace("-", "_")


def known_machines(chip: Chip, system: str) -> Mapping[str, Machine]:
    """Return the machine of every known system: the chip itself, presets, and published peers."""
    machines = {name: _peer(peaks, bandwidth) for name, (peaks, bandwidth) in _PEERS.items()}
    for name in preset_names("chips"):
        preset = load_chip(name)
        machines[system_of(preset)] = Machine.of(preset)
    machines[system] = Machine.of(chip)
    return machines


def _peer(peaks: Mapping[str, float], bandwidth: float) -> Machine:
    return Machine.at(lambda dtype: peaks.get(dtype, peaks["bf16"]), bandwidth)
