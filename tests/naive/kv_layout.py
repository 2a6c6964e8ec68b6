"""Slow, obvious twins of `kv_layout` and `head_tail`; nothing of the package is imported here.

Tokens are dealt and sorted one by one, as one would with cards; there is no index arithmetic.
"""

from __future__ import annotations


def deal(context_len, kv_shards, block_size, interleave):
    """Deal tokens: ``(virtual block, offset in it, rank, place in the rank's block)`` of each."""
    places = []
    block = 0
    while len(places) < context_len:
        filled = [0] * kv_shards
        offset = 0
        while filled[-1] < block_size:
            for rank in range(kv_shards):
                for _ in range(interleave):
                    places.append((block, offset, rank, filled[rank]))
                    filled[rank] += 1
                    offset += 1
        block += 1
    return places[:context_len]


def chunks_of(n_tokens, pcp):
    """Cut positions, pads included, into 2 * pcp equal chunks, as short as can be."""
    length = 1
    while length * 2 * pcp < n_tokens:
        length += 1
    positions = list(range(length * 2 * pcp))
    return [positions[first : first + length] for first in range(0, len(positions), length)]


def split_padded(tokens, pcp, n_decodes):
    """Return what every rank computes request by request, the restore index and the mask.

    A row of the gathered buffer is ``(request, copy, position)``; only decode requests have copies.
    """
    computed = []
    for rank in range(pcp):
        computed.append([])
        for request, n in enumerate(tokens):
            if request < n_decodes:
                computed[rank].append(list(range(n)))
            else:
                chunks = chunks_of(n, pcp)
                computed[rank].append(chunks[rank] + chunks[len(chunks) - 1 - rank])
    gathered = []
    for rank in range(pcp):
        for request, positions in enumerate(computed[rank]):
            gathered += [(request, rank if request < n_decodes else 0, position) for position in positions]
    ordered = sorted(gathered)
    n_decode_rows = sum(request < n_decodes for request, _, _ in ordered)
    mask = [number % pcp == 0 for number in range(n_decode_rows)]
    mask += [position < tokens[request] for request, _, position in ordered[n_decode_rows:]]
    return computed, [gathered.index(row) for row in ordered], mask


def split_virtual(tokens, pcp, n_decodes):
    """Return the rows ``(request, start, stop)`` of every rank, the rows gathered per rank, and the restore index."""
    rows = []
    for rank in range(pcp):
        early, late = [], []
        for request, n in enumerate(tokens):
            if request < n_decodes:
                early.append((request, list(range(n))))
                continue
            chunks = chunks_of(n, pcp)
            for chunk in (chunks[rank], chunks[len(chunks) - 1 - rank]):
                real = [position for position in chunk if position < n]
                if real:
                    (late if real[0] == 0 else early).append((request, real))
        rows.append(early + late)
    flat = [[(request, position) for request, positions in part for position in positions] for part in rows]
    most = max(len(part) for part in flat)
    buffer = [row for part in flat for row in part + [None] * (most - len(part))]
    # The first place is rank 0's where there are copies.
    restore = [buffer.index((request, position)) for request, n in enumerate(tokens) for position in range(n)]
    segments = [[(request, positions[0], positions[-1] + 1) for request, positions in part] for part in rows]
    return segments, most, restore


def causal_pairs(computed, tokens):
    """Count, for one rank, the pairs of a real query and a key not after it, one by one."""
    pairs = 0
    for request, positions in enumerate(computed):
        for query in positions:
            if query < tokens[request]:
                pairs += sum(1 for key in range(tokens[request]) if key <= query)
    return pairs
