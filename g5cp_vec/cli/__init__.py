"""The command line: options in, one library call, print out. One file a command.

Modules here import click and nothing heavy, so that ``--help`` is immediate; a command imports what it needs.
"""

from __future__ import annotations

import click

from g5cp_vec import __version__
from g5cp_vec.cli import accuracy, calibrate, check, kv_layout, list_presets, replay, run, sweep, validate
from g5cp_vec.cli._seam import ErrorSeam


@click.group(
    cls=ErrorSeam,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExample:\n  g5cp-vec sweep sweeps/quickstart.toml",
)
@click.version_option(__version__, prog_name="g5cp-vec")
def main() -> None:
    """Simulate grids of context-parallel LLM deployments: TTFT, TPOT, memory and traffic.

    Exit status: 0 done; 1 a check found something; 2 the input is wrong; 130 interrupted.
    """


for _module in (sweep, run, check, replay, validate, accuracy, calibrate, kv_layout, list_presets):
    main.add_command(_module.command)
