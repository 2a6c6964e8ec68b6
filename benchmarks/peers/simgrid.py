"""SimGrid's C++ on our workloads: built when compiler and library are there, each replay a process of its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("simgrid_replay.cpp")
# SimGrid recomputes what changed (Lazy) or everything (Full); a compute is an activity, or a mere timer.
VARIANTS = [(computes, update) for computes in ("exec", "timer") for update in ("Lazy", "Full")]
# What a program in C++ that follows the manual does: an activity for every op, and the default update.
PLAIN = ("exec", "Lazy")


class Unavailable(Exception):
    """The program cannot be built here; the message says why."""


class Peer(NamedTuple):
    """Answer of one replay: last end (s of the workload), and what its loop took (s of the clock)."""

    makespan_s: float
    loop_s: float
    n_done: int


def build(folder: Path) -> Path:
    """Compile the replay program.

    Raises
    ------
    Unavailable
        No compiler, no library, or the two do not fit this program.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Unavailable("no C++ compiler (apt-get install g++)")
    if not any(Path(root, "simgrid/s4u.hpp").exists() for root in ("/usr/include", "/usr/local/include")):
        raise Unavailable("SimGrid's headers are not installed (apt-get install libsimgrid-dev)")
    program = folder / "simgrid_replay"
    command = [compiler, "-O2", "-std=c++17", "-o", str(program), str(SOURCE), "-lsimgrid"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"does not compile here: {done.stderr.strip().splitlines()[0]}")
    return program


def version() -> str:
    """Return SimGrid's version as its headers give it."""
    for root in ("/usr/include", "/usr/local/include"):
        header = Path(root, "simgrid/version.h")
        if header.exists():
            found = re.search(r'SIMGRID_VERSION_STRING "(.*)"', header.read_text())
            return found[1] if found else "unknown"
    return "unknown"


def replay(program: Path, workload: Path, variant: tuple[str, str]) -> Peer:
    """Replay a workload file once."""
    computes, update = variant
    command = [str(program), str(workload), f"--computes={computes}", f"--update={update}"]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Peer(answer["makespan"], answer["seconds"], answer["n_done"])
