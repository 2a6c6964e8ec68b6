"""A server under a few users who each send the next request when the last one is answered.

Requests are played one by one against the times of whole steps: a step is the prefill of all waiting prompts that fit
into the engine's budget of tokens, or one token for every running sequence. In a step of prefill the running sequences
get a token too, which costs as much as a token of a prompt (continuous batching with mixed steps).

Before the engine sees a prompt the server's front end takes the request and turns its text into tokens, one request
after another, while the engine goes on. A prompt that gets there while steps are under way waits for the current one
and, with an engine that prepares steps ahead of the device, for those already prepared; an engine may also look for new
prompts only every so many steps. Lengths are drawn as benchmarking clients draw them, uniformly from a share of the
stated length up to it; the first requests of all users are sent together.

Not modelled: prompts split over several steps, and what the host does between steps (sampling, handing tokens on).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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
    frontend_s : callable
        Prompt tokens -> seconds until the engine has a request, if it is the only one.
    poll_steps : int
        Decode steps from one look for new prompts to the next; it also looks after every prefill, and while idle.
    """

    prefill_s: Callable[[float], float]
    decode_s: Callable[[int, float], float]
    step_tokens: int
    steps_ahead: int = 0
    wait_steps: int = 0
    frontend_s: Callable[[int], float] = lambda tokens: 0.0
    poll_steps: int = 1


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
    play = _Play(engine, requests)
    for _ in range(client.concurrency):
        play.send()
    while play.coming or play.waiting or play.running:
        play.look()
        if play.waiting and (not play.running or play.held == 0):
            play.prefill()
        else:
            play.decode()
    ttft_s, tpot_s = np.mean(play.done, axis=0).tolist()
    return ttft_s, tpot_s


@dataclass(slots=True)
class _Play:
    """A server in the middle of its requests: who is in the front end, queued, running, and answered."""

    engine: Engine
    requests: list[tuple[int, int]]
    now_s: float = 0.0
    frontend_free_s: float = 0.0
    # Decode steps for which the queue is held back; those made since the engine last looked for prompts.
    held: int = 0
    unlooked: int = 0
    coming: deque[tuple[float, _Sequence]] = field(default_factory=deque)
    waiting: list[_Sequence] = field(default_factory=list)
    running: list[_Sequence] = field(default_factory=list)
    done: list[tuple[float, float]] = field(default_factory=list)

    def send(self) -> None:
        """Let a user send the next request, if there is one."""
        if self.requests:
            prompt, answer = self.requests.pop()
            self.frontend_free_s = max(self.frontend_free_s, self.now_s) + self.engine.frontend_s(prompt)
            self.coming.append((self.frontend_free_s, _Sequence(self.now_s, prompt, answer)))

    def look(self) -> None:
        """Queue the prompts that have come, if the engine looks now; an idle one waits for the next."""
        if not self.running and not self.waiting:
            self.now_s = max(self.now_s, self.coming[0][0])
            self.unlooked = 0
        was_empty = not self.waiting
        while self.unlooked == 0 and self.coming and self.coming[0][0] <= self.now_s:
            self.waiting.append(self.coming.popleft()[1])
        if was_empty and self.waiting and self.running:
            self.held = self.engine.steps_ahead + self.engine.wait_steps

    def prefill(self) -> None:
        """Make a step of as many queued prompts as fit; what is left of the queue is held back no longer."""
        step = _admit(self.waiting, self.engine.step_tokens)
        self.now_s += self.engine.prefill_s(sum(s.prompt for s in step) + len(self.running))
        for s in step:
            s.first_s = self.now_s
        self.running += step
        self.held = self.unlooked = 0
        self._made(1)

    def decode(self) -> None:
        """Make decode steps until something else may happen: an answer ends, or the queue may go, or grow."""
        n_steps = min(s.answer - s.made for s in self.running)
        if self.waiting:
            n_steps = min(n_steps, self.held)
        if self.coming:
            n_steps = min(n_steps, self._steps_to_look(self.coming[0][0]))
        self.now_s += self._decode_s(n_steps)
        self.held -= n_steps if self.waiting else 0
        self.unlooked = (self.unlooked + n_steps) % self.engine.poll_steps
        self._made(n_steps)

    def _decode_s(self, n_steps: int) -> float:
        # The mean context grows by one token a step, and a step's time linearly with it.
        context = sum(s.prompt + s.made for s in self.running) / len(self.running) + (n_steps - 1) / 2
        return n_steps * self.engine.decode_s(len(self.running), context)

    def _steps_to_look(self, come_s: float) -> int:
        """Return the decode steps until the engine looks and finds a prompt that comes then."""
        left_s = come_s - self.now_s
        n_steps = max(1, math.ceil(left_s / self._decode_s(1)))
        # Steps get longer, so that it may be fewer.
        while n_steps > 1 and self._decode_s(n_steps - 1) >= left_s:
            n_steps -= 1
        return n_steps + -(self.unlooked + n_steps) % self.engine.poll_steps

    def _made(self, n_steps: int) -> None:
        """Give every running sequence its tokens; users whose answer is complete send the next request."""
        for s in self.running:
            s.made += n_steps
        ended = [s for s in self.running if s.made >= s.answer]
        self.running = [s for s in self.running if s.made < s.answer]
        for s in ended:
            self.done.append((s.first_s - s.sent_s, (self.now_s - s.first_s) / max(s.answer - 1, 1)))
            self.send()


def _admit(waiting: list[_Sequence], budget: int) -> list[_Sequence]:
    """Take the prompts of the next step off the queue: in order, whole, at least one."""
    taken = [waiting.pop(0)]
    left = budget - taken[0].prompt
    while waiting and waiting[0].prompt <= left:
        left -= waiting[0].prompt
        taken.append(waiting.pop(0))
    return taken
