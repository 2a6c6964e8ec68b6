"""The software stack under a deployment: what it costs beyond the work itself."""

from __future__ import annotations

from pathlib import Path

from g5cp_vec.config._files import locate, read_record
from g5cp_vec.config._record import NonNegative, Record

IDEAL = "ideal"


class Runtime(Record):
    """Fixed costs of launching and synchronising.

    Attributes
    ----------
    prefill_op_overhead_s, decode_op_overhead_s : float
        Added to every compute operation of a prefill or of a decode step (s); the two differ because decode steps
        are commonly replayed from a captured graph and prefills are not.
    """

    prefill_op_overhead_s: NonNegative
    decode_op_overhead_s: NonNegative


def load_runtime(name_or_path: str, base: Path | None = None) -> Runtime:
    """Return a runtime by preset name or TOML path; see :func:`g5cp_vec.config.model.load_model`."""
    return read_record(Runtime, locate("runtimes", name_or_path, base))
