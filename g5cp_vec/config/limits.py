"""What an engine is configured for: new tokens of a step, sequences at once, the longest context.

``max_num_batched_tokens`` is what a scheduler may give to one step of a dp replica, before pcp ranks split it; where
tokens are split over tp as well (``tp_sp``; FlashComm1 of vllm-ascend) it is rounded up to a multiple of all ranks.
Prompts are served as they came: one that has more is computed in passes, and the next one follows; of shorter ones as
many go together as a step has room for. A scheduler would fill what a step has left with the beginning of the next
prompt; here a pass is over sequences that are alike, so that the last pass of a prompt may have room left. Where
``chunk_tokens`` says how much of a prompt a pass may compute, several prompts share a step.
``max_num_seqs`` and ``max_model_len`` decide with it what is allocated ahead. What is left out follows from the load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_INSTEAD = "raise the limit, or leave it out"


def step_tokens(max_num_batched_tokens: int, ranks: int, *, splits_tokens: bool) -> int:
    """Return the new tokens that a step of a replica may have; ``splits_tokens`` over all of its tp * pcp ranks."""
    return -(-max_num_batched_tokens // ranks) * ranks if splits_tokens else max_num_batched_tokens


def has_limits(dep: Any) -> bool:
    """Whether a deployment says what its engine is configured for."""
    return (dep.max_num_batched_tokens, dep.max_num_seqs, dep.max_model_len) != (None, None, None)


def steps_of(deployments: Sequence[Any], deployment: NDArray[np.int32]) -> Ints:
    """Return the new tokens of a step of every row, 0 without a limit; ``deployment`` has shape (n_rows,)."""
    steps = [getattr(dep, "step_tokens", None) or 0 for dep in deployments]
    return np.array(steps, np.int64)[deployment]


def at_once(steps: Any, batch: Ints, new: Ints, chunk_tokens: Ints) -> Ints:
    """Return the sequences that a pass of a prefill computes together: as many as a step has room for, one at least.

    Parameters
    ----------
    steps : int or ndarray
        New tokens of a step, 0 without a limit: then all of a batch are computed together.
    batch, new, chunk_tokens : ndarrays of int64, shape (n,)
        Sequences, new tokens of each, and how many of them a pass computes at most (0 for all).
    """
    each = np.maximum(np.where(chunk_tokens > 0, np.minimum(chunk_tokens, new), new), 1)
    return np.where(steps > 0, np.clip(steps // each, 1, batch), batch)


def over_limits(
    dep: Any, seq_len: Ints, batch: Ints, cached_tokens: Ints, chunk_tokens: Ints
) -> Iterator[tuple[int, str]]:
    """Yield which loads an engine is not configured for, and why.

    Parameters
    ----------
    dep : Deployment
    seq_len, batch, cached_tokens, chunk_tokens : ndarrays of int64, shape (n,)
    """
    steps, seqs, longest = dep.step_tokens, dep.max_num_seqs, dep.max_model_len
    if longest is not None:
        limit = f"max_model_len = {longest}: {_INSTEAD}"
        yield from _each(seq_len > longest, lambda at: f"seq_len = {seq_len[at]} exceeds {limit}")
    if seqs is not None:
        limit = f"max_num_seqs = {seqs}: {_INSTEAD}"
        yield from _each(batch > seqs, lambda at: f"batch = {batch[at]} exceeds {limit}")
    if steps is None:
        return
    limit = f"max_num_batched_tokens = {dep.max_num_batched_tokens}"
    if dep.phase == "decode":
        yield from _each(
            batch > steps, lambda at: f"{limit} has no token of a step for each of batch = {batch[at]}: {_INSTEAD}"
        )
        return
    each = np.minimum(chunk_tokens, seq_len - cached_tokens)
    yield from _each(
        each > steps,
        lambda at: f"chunk_tokens = {chunk_tokens[at]} exceeds {limit}: use no more than that, or leave it out",
    )


def _each(refused: NDArray[np.bool_], text: Callable[[int], str]) -> Iterator[tuple[int, str]]:
    for at in np.flatnonzero(refused).tolist():
        yield at, text(at)
