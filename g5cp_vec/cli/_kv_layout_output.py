"""Tables, pictures and CSV of ``g5cp-vec kv-layout``."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterator, Sequence

import click
import numpy as np
from numpy.typing import NDArray

from g5cp_vec.cli._output import print_table
from g5cp_vec.cli._words import say
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.head_tail import BatchSplit
from g5cp_vec.mapping.kv_layout import KVLayout, reusable_prefix_tokens

# Python's csv module, among others, refuses longer cells unless it is told to take them.
LONGEST_CELL = 131_072
# Gathered rows times ranks of which all cells are printed on demand: some hundred megabytes.
MOST_PRINTED_ROWS = 2**24
_ROWS_AT_A_TIME = 2**18
_MOST_LINES, _MOST_MARKS, _MOST_BLOCKS, _MOST_RUNS, _MOST_INDICES, _MOST_ROWS = 16, 96, 4, 3, 64, 6
_OWNERS = "0123456789abcdefghijklmnopqrstuvwxyz"
PADDED, VIRTUAL = "padded", "virtual batch"
# The columns of a split, and the form that a column belongs to.
SPLIT_COLUMNS = {
    "scheduled_tokens": None,
    "num_decode_reqs": None,
    "pcp": None,
    "rank": None,
    "padded_len_per_req": PADDED,
    "padded_tokens_per_rank_per_req": PADDED,
    "padded_form_positions(head+tail,per req)": PADDED,
    "padded_form_real_tokens": PADDED,
    "padded_form_pad_tokens": PADDED,
    "causal_qk_pairs_real": None,
    "padded_form_restore_idx": PADDED,
    "padded_form_unpad_mask": PADDED,
    "virtual_batch_form_segments": VIRTUAL,
    "virtual_batch_form_tokens": VIRTUAL,
    "virtual_batch_form_gather_rows_per_rank": VIRTUAL,
    "virtual_batch_form_restore_idx": VIRTUAL,
}


def chosen_forms(*, padded: bool, unpadded: bool) -> tuple[str, ...]:
    """Return the forms to show: both unless one is asked for."""
    if padded == unpadded:
        return (PADDED, VIRTUAL)
    return (PADDED,) if padded else (VIRTUAL,)


# ---- a context ----


def print_context_csv(layout: KVLayout, context_len: int) -> None:
    """Print a row per token; contexts of any length pass through piece by piece."""
    import polars as pl

    for first in range(0, context_len, _ROWS_AT_A_TIME):
        tokens = np.arange(first, min(first + _ROWS_AT_A_TIME, context_len))
        frame = pl.DataFrame({"token": tokens, **layout.place(tokens)._asdict()})
        click.echo(frame.write_csv(include_header=first == 0), nl=False)


def print_context(layout: KVLayout, context_len: int) -> None:
    """Print sizes, what each rank holds, and for short contexts a picture."""
    n_blocks, granularity = layout.blocks(context_len), layout.virtual_block_tokens
    allocated = n_blocks * layout.block_size
    reusable = reusable_prefix_tokens(context_len, layout.kv_shards, layout.block_size)
    print_table(
        [f"context of {context_len} tokens", "tokens"],
        [
            ("block, on one rank", str(layout.block_size)),
            ("interleave, dealt to a rank before the next one's turn", str(layout.interleave)),
            (
                f"virtual block, on all {layout.kv_shards} ranks: what the prefix cache finds and keeps",
                str(granularity),
            ),
            ("reusable as a prefix, whole virtual blocks", str(reusable)),
            (f"allocated on every rank, {n_blocks} block{'s' * (n_blocks > 1)}", str(allocated)),
            ("allocated on all ranks and not filled", str(allocated * layout.kv_shards - context_len)),
        ],
    )
    _print_context_picture(layout, context_len)
    lengths = layout.tokens_per_rank(context_len)
    shown = _some(n_blocks, _MOST_BLOCKS)
    headers = ["rank", "tokens", "first", "last", "in blocks"]
    headers += ["…" if block is None else f"block {block}" for block in shown]
    rows = []
    for rank in _some(layout.kv_shards, _MOST_LINES):
        if rank is None:
            rows.append(["…"] * len(headers))
            continue
        n = int(lengths[rank])
        first, last = layout.tokens_of(rank, [0, n - 1]).tolist() if n else ("-", "-")
        row = [str(rank), str(n), str(first), str(last), str(-(-n // layout.block_size))]
        rows.append(row + ["…" if block is None else _block_text(layout, rank, block, n) for block in shown])
    print_table(headers, rows)


def _print_context_picture(layout: KVLayout, context_len: int) -> None:
    n_runs = -(-context_len // layout.interleave)
    if n_runs > _MOST_MARKS or layout.kv_shards > _MOST_LINES:
        return
    runs_per_block = layout.virtual_block_tokens // layout.interleave
    each = "a token" if layout.interleave == 1 else f"{layout.interleave} tokens"
    rows = []
    for rank in range(layout.kv_shards):
        marks = "".join("█" if run % layout.kv_shards == rank else "·" for run in range(n_runs))
        rows.append((str(rank), "|".join(_pieces(marks, runs_per_block))))
    print_table(["rank", f"each mark is {each}, | ends a virtual block"], rows, n_left=2)


def _block_text(layout: KVLayout, rank: int, block: int, n_tokens: int) -> str:
    """Return the tokens in one block of a rank: ``0-7 32-39 … 480-487``."""
    begin, end = block * layout.block_size, min((block + 1) * layout.block_size, n_tokens)
    n_runs = -(-(end - begin) // layout.interleave)
    if n_runs <= 0:
        return "-"
    texts = []
    for run in _some(n_runs, _MOST_RUNS):
        if run is None:
            texts.append("…")
            continue
        first = begin + run * layout.interleave
        texts.append(_span(*layout.tokens_of(rank, [first, min(first + layout.interleave, end) - 1]).tolist()))
    return " ".join(texts)


# ---- a batch ----


def print_split_csv(batch: BatchSplit, forms: Sequence[str], *, long_cells: bool = False) -> None:
    """Print a row per rank; lists are separated by blanks, the requests of positions by bars.

    Cells that csv readers refuse are left empty, which a line on the error stream says, or written with ``long_cells``.
    """
    rows, longest = int(batch.padded_lengths.sum()), sys.maxsize if long_cells else LONGEST_CELL
    if long_cells and rows * batch.pcp > MOST_PRINTED_ROWS:
        raise ConfigError(
            f"--long-cells: expected at most {MOST_PRINTED_ROWS} rows times ranks, got {rows} times {batch.pcp}"
            "; use fewer tokens, or the arrays of g5cp_vec.mapping.head_tail"
        )
    columns = [name for name, form in SPLIT_COLUMNS.items() if form is None or form in forms]
    index_cells = dict(_index_cells(batch, forms, longest))
    left_empty: dict[str, None] = {}
    for rank in range(batch.pcp):
        cells = {**dict(_rank_cells(batch, rank, forms, longest)), **index_cells}
        left_empty |= dict.fromkeys(name for name in columns if cells[name] is None)
        lines = io.StringIO()
        writer = csv.DictWriter(lines, columns, lineterminator="\n")
        if rank == 0:
            writer.writeheader()
        writer.writerow(cells)
        click.echo(lines.getvalue(), nl=False)
    if left_empty:
        names = "; ".join(left_empty)
        say(f"cells of more than {LONGEST_CELL} characters are left empty without --long-cells: {names}")


def _rank_cells(batch: BatchSplit, rank: int, forms: Sequence[str], longest: int) -> Iterator[tuple[str, str | None]]:
    """Yield the cells of a rank, but for those of `_index_cells`."""
    yield "scheduled_tokens", _words(batch.tokens)
    yield "num_decode_reqs", str(batch.n_decodes)
    yield "pcp", str(batch.pcp)
    yield "rank", str(rank)
    yield "causal_qk_pairs_real", str(batch.causal_pairs[rank])
    if PADDED in forms:
        per_rank = batch.padded_lengths_per_rank
        yield "padded_len_per_req", _words(batch.padded_lengths)
        yield "padded_tokens_per_rank_per_req", _words(per_rank)
        positions = _cell(longest, int(per_rank.sum()), lambda: " | ".join(map(_words, batch.padded_positions(rank))))
        yield "padded_form_positions(head+tail,per req)", positions
        yield "padded_form_real_tokens", str(batch.real_tokens[rank])
        yield "padded_form_pad_tokens", str(batch.pad_tokens[rank])
    if VIRTUAL in forms:
        segments = "; ".join(f"req{row.request}[{row.start}:{row.stop}]" for row in batch.virtual_rows(rank))
        yield "virtual_batch_form_segments", segments if len(segments) <= longest else None
        yield "virtual_batch_form_tokens", str(batch.real_tokens[rank])
        yield "virtual_batch_form_gather_rows_per_rank", str(batch.gather_rows)


def _index_cells(
    batch: BatchSplit, forms: Sequence[str], longest: int = LONGEST_CELL
) -> Iterator[tuple[str, str | None]]:
    """Yield the cells that undo a gather, the same on all ranks."""
    n_padded, n_tokens = int(batch.padded_lengths.sum()), int(batch.tokens.sum())
    if PADDED in forms:
        yield "padded_form_restore_idx", _cell(longest, n_padded, lambda: _words(batch.padded_restore_index()))
        yield "padded_form_unpad_mask", _cell(longest, n_padded, lambda: _bits(batch.padded_unpad_mask()), n_blanks=0)
    if VIRTUAL in forms:
        yield "virtual_batch_form_restore_idx", _cell(longest, n_tokens, lambda: _words(batch.virtual_restore_index()))


def _cell(longest: int, n_entries: int, text_of: Callable[[], str], n_blanks: int = 1) -> str | None:
    """Return a list's text, None where it is too long for a cell; arrays that cannot fit are not even made."""
    if n_entries * (1 + n_blanks) - n_blanks > longest:
        return None
    text = text_of()
    return text if len(text) <= longest else None


def _words(numbers: NDArray[np.int64]) -> str:
    return " ".join(map(str, numbers.tolist()))


def _bits(mask: NDArray[np.bool_]) -> str:
    return (mask + np.uint8(ord("0"))).tobytes().decode()


def print_split(batch: BatchSplit, forms: Sequence[str]) -> None:
    """Print requests, what each rank computes, and for short batches pictures and restore indices."""
    n, last = len(batch.tokens), 2 * batch.pcp - 1
    click.echo(
        f"{n} request{'s' * (n > 1)}, {batch.n_decodes} of them decode: {batch.tokens.sum()} new tokens over pcp = "
        f"{batch.pcp}; rank r computes chunks r and {last} - r of each prefill, and all decode tokens"
    )
    _print_requests(batch, forms)
    _print_split_picture(batch)
    headers = ["rank"] + (["virtual batch, in order"] if VIRTUAL in forms else []) + ["tokens", "causal pairs"]
    headers += ["rows gathered"] if VIRTUAL in forms else []
    headers += ["pads in padded form", "rows in padded form"] if PADDED in forms else []
    rows = []
    for rank in _some(batch.pcp, _MOST_LINES):
        if rank is None:
            rows.append(["…"] * len(headers))
            continue
        real, pads = int(batch.real_tokens[rank]), int(batch.pad_tokens[rank])
        row = [str(rank)] + ([_rows_text(batch, rank)] if VIRTUAL in forms else [])
        row += [str(real), str(batch.causal_pairs[rank])] + ([str(batch.gather_rows)] if VIRTUAL in forms else [])
        rows.append(row + ([str(pads), str(real + pads)] if PADDED in forms else []))
    print_table(headers, rows, n_left=2 if VIRTUAL in forms else 1)
    for name, cell in _index_cells(batch, forms):
        if cell is not None and max(len(cell.split()), len(cell) // 3) <= _MOST_INDICES:
            click.echo(f"{name}: {cell}")


def _print_requests(batch: BatchSplit, forms: Sequence[str]) -> None:
    headers = ["request", "kind", "tokens", "chunk"] + (["padded", "per rank"] if PADDED in forms else [])
    per_rank, padded = batch.padded_lengths_per_rank, batch.padded_lengths
    rows = []
    for request in _some(len(batch.tokens), _MOST_LINES):
        if request is None:
            rows.append(["…"] * len(headers))
            continue
        is_decode = request < batch.n_decodes
        row = [f"req{request}", "decode" if is_decode else "prefill", str(batch.tokens[request])]
        row.append("-" if is_decode else str(per_rank[request] // 2))
        rows.append(row + ([str(padded[request]), str(per_rank[request])] if PADDED in forms else []))
    print_table(headers, rows, n_left=2)


def _print_split_picture(batch: BatchSplit) -> None:
    """Show which rank computes each token of the prefills, where there are few tokens, requests and ranks."""
    prefills = range(batch.n_decodes, len(batch.tokens))
    longest = max((int(batch.padded_lengths[request]) for request in prefills), default=0)
    if not prefills or longest > _MOST_MARKS or len(prefills) > _MOST_LINES or batch.pcp > len(_OWNERS):
        return
    owners = _OWNERS[: batch.pcp] + _OWNERS[: batch.pcp][::-1]
    rows = []
    for request in prefills:
        chunk = int(batch.padded_lengths_per_rank[request]) // 2
        marks = "".join(owner * chunk for owner in owners)[: batch.tokens[request]]
        pads = "·" * (chunk * len(owners) - len(marks))
        rows.append((f"req{request}", "|".join(_pieces(marks + pads, chunk))))
    print_table(["request", "rank of each token, chunk by chunk; · is a pad"], rows, n_left=2)


def _rows_text(batch: BatchSplit, rank: int) -> str:
    rows = batch.virtual_rows(rank)
    texts = []
    for place in _some(len(rows), _MOST_ROWS):
        row = None if place is None else rows[place]
        texts.append("…" if row is None else f"req{row.request} {_span(row.start, row.stop - 1)}")
    return ", ".join(texts) or "-"


# ---- both ----


def _some(n: int, most: int) -> list[int | None]:
    """Return 0 to n - 1; where these are more than ``most``, the first ones, None for a gap, and the last."""
    return [*range(n)] if n <= most else [*range(most - 1), None, n - 1]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _pieces(text: str, length: int) -> Iterator[str]:
    return (text[begin : begin + length] for begin in range(0, len(text), length))
