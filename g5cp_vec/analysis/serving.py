"""A server under a few users who each send the next request when the last one is answered.

Requests are played one by one against the times of whole steps: a step is the prefill of all waiting prompts that fit
into the engine's budget of tokens, or one token for every running sequence. In a step of prefill the running sequences
get a token too, which costs as much as a token of a prompt (continuous batching with mixed steps). A request that
arrives while steps are under way waits for the current one and, with an engine that prepares steps ahead of the device,
for those already prepared. Lengths are drawn as benchmarking clients draw them, uniformly from a share of the stated
length up to it; the first requests of all users arrive together.

Not modelled: prompts split over several steps, and the server's work outside the model (tokenising, sampling on the
host, network), which no table of kernels tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SEEDS = 16


class Served(NamedTuple):
    """Mean time to first token and mean time per output token of a request (s)."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks.

    Attributes
    ----------
    concurrency : int
        Users.
    input_tokens, output_tokens : int
        Longest prompt and longest answer.
    n_requests : int
        Of all users together.
    shortest : float
        Shortest length as a share of the longest (0-1].
    """

    concurrency: int
    input_tokens: int
    output_tokens: int
    n_requests: int
    shortest: float = 1.0


@dataclass(frozen=True, slots=True)
class Engine:
    """Who answers.

    Attributes
    ----------
    prefill_s : callable
        Prompt tokens of a step -> seconds.
    decode_s : callable
        (sequences, mean tokens of context) -> seconds of a step; linear in the second.
    step_tokens : int
        Prompt tokens that a step takes at most; one prompt always fits.
    steps_ahead : int
        Steps prepared beyond the one under way.
    wait_steps : int
        Decode steps for which a prompt is held back, so that others may join it.
    """

    prefill_s: Callable[[float], float]
    decode_s: Callable[[int, float], float]
    step_tokens: int
    steps_ahead: int = 0
    wait_steps: int = 0


@dataclass(slots=True)
class _Sequence:
    sent_s: float
    prompt: int
    answer: int
    made: int = 0
    first_s: float = 0.0


def serve(client: Client, engine: Engine) -> Served:
    """Return what users see on average, over several draws of the lengths."""
    played = [_play(client, engine, np.random.default_rng(seed)) for seed in range(_SEEDS)]
    return Served(*np.mean(played, axis=0).tolist())


def _play(client: Client, engine: Engine, rng: np.random.Generator) -> tuple[float, float]:
    def lengths(longest: int) -> NDArray[np.int64]:
        return rng.integers(int(longest * client.shortest), longest + 1, client.n_requests)

    requests = list(zip(lengths(client.input_tokens).tolist(), lengths(client.output_tokens).tolist(), strict=True))
    waiting, running, done = list[_Sequence](), list[_Sequence](), list[tuple[float, float]]()
    now_s, held = 0.0, 0

    def send() -> None:
        if requests:
            prompt, answer = requests.pop()
            waiting.append(_Sequence(now_s, prompt, answer))

    for _ in range(client.concurrency):
        send()
    while waiting or running:
        if waiting and (not running or held == 0):
            step = _admit(waiting, engine.step_tokens)
            n_prompt = sum(s.prompt for s in step)
            now_s += engine.prefill_s(n_prompt + len(running))
            for s in step:
                s.first_s = now_s
            running += step
            n_steps = 1
        else:
            n_steps = min(s.answer - s.made for s in running)
            n_steps = min(n_steps, held) if waiting else n_steps
            held -= n_steps if waiting else 0
            # The mean context grows by one token a step, and a step's time linearly with it.
            context = sum(s.prompt + s.made for s in running) / len(running) + (n_steps - 1) / 2
            now_s += n_steps * engine.decode_s(len(running), context)
        for s in running:
            s.made += n_steps
        ended = [s for s in running if s.made >= s.answer]
        running = [s for s in running if s.made < s.answer]
        was_idle = not waiting
        for s in ended:
            done.append((s.first_s - s.sent_s, (now_s - s.first_s) / max(s.answer - 1, 1)))
            send()
        if waiting and was_idle:
            held = engine.steps_ahead + engine.wait_steps
    ttft_s, tpot_s = np.mean(done, axis=0).tolist()
    return ttft_s, tpot_s


def _admit(waiting: list[_Sequence], budget: int) -> list[_Sequence]:
    """Take the prompts of the next step off the queue: in order, whole, at least one."""
    taken = [waiting.pop(0)]
    left = budget - taken[0].prompt
    while waiting and waiting[0].prompt <= left:
        left -= waiting[0].prompt
        taken.append(waiting.pop(0))
    return taken
