"""What a deployment's users see, from times of its steps: the engine of :mod:`g5cp_vec.analysis.serving` filled in.

Prefill of one prompt of the shortest and of the longest length, and of as many prompts of middle length as fit into a
step; decode of every number of users at the first and the last context of an answer. In between times are linear. A
prefill outside of a graph lasts at least as long as the host takes to launch it
(:func:`g5cp_vec.cost.rows.host_seconds`). Before the engine sees a prompt the server's front end works on it, as long
as the runtime says.

What is left out is the host's and the version's: passes of short prompts of DeepSeek that take servers longer than
their kernels are launched in, and what a server compiles or tunes when shapes come for the first time. The README has
the evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from g5cp_vec.analysis.serving import Client, Engine, Served, serve
from g5cp_vec.config.deployment import Deployment
from g5cp_vec.config.grid import load_grid
from g5cp_vec.cost.rows import host_seconds
from g5cp_vec.mapping.load import build_load
from g5cp_vec.runner.api import run_sweep


def predict_served(point: Mapping[str, Any], client: Client, wait_steps: int, poll_steps: int, place: str) -> Served:
    """Return what users of a deployment see.

    Parameters
    ----------
    point : mapping
        Keys of a point without phase and load.
    client : Client
    wait_steps : int
        Decode steps for which the engine holds a prompt back.
    poll_steps : int
        Decode steps from one look of the engine for new prompts to the next.
    place : str
        What complaints about the point begin with.

    Raises
    ------
    ConfigError
        The point is none.
    """
    dep = _deployment(point, client, place)
    runtime = dep.runtime
    budget, users = runtime.step_tokens, client.concurrency
    shortest, longest = int(client.input_tokens * client.shortest), client.input_tokens
    middle, answer = (shortest + longest) // 2, client.output_tokens
    n_fit = max(1, min(users, budget // longest))
    prefill = _times(point, "prefill", sorted({shortest, longest}), [1], place)
    if n_fit > 1:
        several = _times(point, "prefill", [middle], list(range(2, n_fit + 1)), place)
        prefill |= {pair: seconds for pair, seconds in several.items() if pair[0] * pair[1] > longest}
    tokens = np.array([length * batch for length, batch in prefill], float)
    host_s = host_seconds(dep, build_load(dep, longest, 1, 0))
    prefill_s = np.maximum(list(prefill.values()), host_s)
    decode = _times(point, "decode", [middle, middle + answer], list(range(1, users + 1)), place)

    def prefill_seconds(n: float) -> float:
        # A few tokens beyond the last sample: those of running sequences.
        return float(np.interp(n, tokens, prefill_s)) * max(1.0, n / float(tokens[-1]))

    def decode_seconds(batch: int, context: float) -> float:
        first_s, last_s = decode[middle, batch], decode[middle + answer, batch]
        return first_s + (last_s - first_s) * (context - middle) / answer

    def frontend_seconds(n: int) -> float:
        return runtime.frontend_request_s + runtime.frontend_token_s * n

    ahead = runtime.steps_ahead
    engine = Engine(prefill_seconds, decode_seconds, budget, ahead, wait_steps, frontend_seconds, poll_steps)
    return serve(client, engine)


def _deployment(point: Mapping[str, Any], client: Client, place: str) -> Deployment:
    fixed = {**point, "phase": "prefill", "seq_len": client.input_tokens}
    grid = load_grid({"name": place, "fixed": fixed, "points": {"on_invalid": "error"}})
    dep = grid.expand().deployments[0]
    assert isinstance(dep, Deployment)
    return dep


def _times(
    point: Mapping[str, Any], phase: str, lengths: list[int], batches: list[int], place: str
) -> dict[tuple[int, int], float]:
    """Return the times of steps (s) by length of the sequences and number of them."""
    fixed = {key: value for key, value in point.items() if key not in ("phase", "seq_len", "batch")}
    axes = {"seq_len": lengths, "batch": batches}
    grid = load_grid(
        {"name": place, "fixed": {**fixed, "phase": phase}, "axes": axes, "points": {"on_invalid": "error"}}
    )
    table = run_sweep(grid, audit="none")
    column = "ttft_s" if phase == "prefill" else "tpot_s"
    return dict(zip(zip(table["seq_len"], table["batch"], strict=True), table[column], strict=True))
