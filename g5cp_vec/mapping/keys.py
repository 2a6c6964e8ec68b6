"""What the ops of a graph are called: why they exist, what their costs mean, and by which call they are sent."""

from __future__ import annotations

# Why an op exists. Positions in this table are the codes in ``OpGraph.op_reason``.
REASONS = (
    "embed", "qkv", "attention", "merge", "o_proj", "ffn", "moe", "lm_head",
    "cp_pass_kv", "cp_pass_q", "cp_reduce", "tp", "ep", "pp", "cp_halo", "cp_gather", "sync", "pcp", "dcp",
)  # fmt: skip
REASON = {name: code for code, name in enumerate(REASONS)}
# Calls of a collective library that may add a latency of their own to a route's (None adds nothing).
LIBRARY_CALLS = (None, "send_recv", "all_to_all")

# Name of a compute op and index of its layer kind (None outside layers), and the rate id of its chip where that is
# not 0; name of a message, with the index where its size depends on it.
ComputeKey = tuple[str, int | None]
DurationKey = ComputeKey | tuple[str, int | None, int]
MessageKey = str | tuple[str, int]


def split_rate(key: DurationKey) -> tuple[ComputeKey, int]:
    """Return what a compute op does, and the rate id of the chips that do it."""
    return key[:2], key[2] if len(key) == 3 else 0


class CostKeys:
    """Numbers the costs that a structure's ops refer to: what they mean is known, what they amount to is not.

    Parameters
    ----------
    n_rates : int
        Different speeds of chips; a duration has an id for each, in consecutive order.
    """

    def __init__(self, n_rates: int = 1) -> None:
        self.n_rates = n_rates
        self.durations: dict[DurationKey, int] = {}
        self.bytes: dict[MessageKey, int] = {}

    def duration(self, key: ComputeKey) -> int:
        """Return the duration id of ``key`` at full speed; `BlockBuilder.compute` adds the rate id of each chip."""
        if key not in self.durations:
            slower: list[DurationKey] = [(*key, rate) for rate in range(1, self.n_rates)]
            for each in [key, *slower]:
                self.durations[each] = len(self.durations)
        return self.durations[key]

    def message(self, key: MessageKey) -> int:
        """Return the bytes id of ``key``."""
        return self.bytes.setdefault(key, len(self.bytes))


def latency_block(message: int, call: str | None) -> int:
    """Return which block of latency ids a flow has, each as long as the network's ids, which are block 0.

    Where the library counts, the network's ids come once more for each bytes id and each of `LIBRARY_CALLS`.
    """
    return 1 + message * len(LIBRARY_CALLS) + LIBRARY_CALLS.index(call)
