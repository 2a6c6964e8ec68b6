"""``g5cp-vec`` and ``python -m g5cp_vec``: the command line, whose import may be interrupted as well."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from g5cp_vec.cli import main as command
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    command(prog_name="g5cp-vec")


if __name__ == "__main__":
    main()
