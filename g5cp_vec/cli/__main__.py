"""``python -m g5cp_vec.cli``."""

from g5cp_vec.cli import main

main(prog_name="g5cp-vec")
