"""What a user waits for before anything is simulated; each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

REPLAY = """
import g5cp_vec
g5cp_vec.replay({"links": [{"bw": 1.0}], "chips": 1, "deps": [[0, 1]],
    "ops": [{"kind": "compute", "chip": 0, "secs": 1.0}, {"kind": "flow", "route": [0], "bytes": 1.0}]})
"""
RUN = """
import g5cp_vec
print(g5cp_vec.run({"name": "first", "fixed": {"model": "llama-3.1-8b", "chip": "h100-sxm", "topology": "hgx-8",
    "phase": "prefill", "n_chips": 16, "tp": 2, "cp": 4, "dp": "auto", "seq_len": "8K"}}).ttft_s)
"""


def call(*arguments, **environment):
    subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.mark.benchmark(group="startup")
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("-c", "pass"), id="python itself"),
        pytest.param(("-c", "import g5cp_vec"), id="import"),
        pytest.param(("-m", "g5cp_vec.cli", "--help"), id="help"),
        pytest.param(("-c", REPLAY), id="first replay, compiled before"),
        pytest.param(("-c", RUN), id="first run, compiled before"),
    ],
)
def test_start(benchmark, arguments):
    call(*arguments)
    benchmark.pedantic(call, arguments, rounds=5)


@pytest.mark.slow
@pytest.mark.benchmark(group="startup")
@pytest.mark.parametrize("code", [pytest.param(REPLAY, id="first replay ever"), pytest.param(RUN, id="first run ever")])
def test_compilation(benchmark, tmp_path, code):
    """Into a cache folder that is empty."""
    benchmark.pedantic(call, ("-c", code), {"NUMBA_CACHE_DIR": str(tmp_path)}, rounds=1)
