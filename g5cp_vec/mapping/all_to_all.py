"""All-to-all over groups of ranks: every member has a message for every other."""

from __future__ import annotations

import numpy as np

from g5cp_vec.mapping.collectives import direct_exchange
from g5cp_vec.mapping.graph import BlockBuilder, Ids


def all_to_all(b: BlockBuilder, chips: Ids, after: list[Ids], message: int, reason: str, algorithm: str) -> list[Ids]:
    """Send ``message`` bytes from every member to every other; return what each must wait for.

    ``direct``: all at once. ``ring``: pairwise exchange, in step k to the k-th member ahead and from the k-th behind,
    a step after both of the one before; every byte crosses once, as with ``direct``.
    """
    if algorithm == "direct":
        return direct_exchange(b, chips, after, message, reason, call="all_to_all")
    member = np.arange(chips.shape[1])
    arrived: list[Ids] = []
    for step in range(1, chips.shape[1]):
        sent = b.flow(chips, chips[:, (member + step) % len(member)], message, reason, step - 1, "all_to_all")
        for pred in after:
            b.edge(pred, sent)
        received = sent[:, (member - step) % len(member)]
        arrived.append(received)
        after = [sent, received]
    return arrived
