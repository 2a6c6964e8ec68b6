"""The command line run in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from g5cp_vec.cli import main

POINT = """
[fixed]
phase = "prefill"
model = "llama-3.1-8b"
chip = "h100-sxm"
topology = "flat-450"
n_chips = 2
cp = 2
seq_len = "1K"
"""


def invoke(*args: object) -> Result:
    """Run ``g5cp-vec`` with these words; it may leave by an exit status, never by a traceback."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result
