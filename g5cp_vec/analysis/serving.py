"""A server under a few users, from one prefill and one decode step.

Each of c users sends a request, waits for its answer, and sends the next one at once. Prefills run one at a time, in
one piece, and no decode step runs meanwhile. So while one user's answer of n tokens is made, each of the other users
interrupts it by a prefill once; and a request that arrives waits for the prefill or the decode step it finds under way,
half of it on average. Not modelled: users who start together and keep meeting, chunked prefill, the server's own work
for a request.
"""

from __future__ import annotations

from typing import NamedTuple

_ROUNDS = 64


class Served(NamedTuple):
    """Mean time to first token and mean time per output token of a request (s)."""

    ttft_s: float
    tpot_s: float


def closed_loop(prefill_s: float, step_s: float, concurrency: int, output_tokens: int) -> Served:
    """Return what users see.

    Parameters
    ----------
    prefill_s : float
        Prefill of one request (s).
    step_s : float
        Decode step of all users' sequences (s).
    concurrency : int
    output_tokens : int
        Tokens of an answer.
    """
    others = concurrency - 1
    tpot_s = step_s + others * prefill_s / output_tokens
    wait_s = 0.0
    for _ in range(_ROUNDS):  # a request's own wait makes a round longer; contracts by far
        share = others * prefill_s / (prefill_s + wait_s + output_tokens * tpot_s)
        wait_s = (share * prefill_s + (1 - share) * step_s * (others > 0)) / 2
    return Served(prefill_s + wait_s, tpot_s)
