"""`g5cp-vec kv-layout`: CSV against the oracle, tables and pictures by eye, refusals."""

from __future__ import annotations

import csv
import io
import re

import polars as pl
import pytest
from commands import invoke
from hypothesis import given, settings
from test_cli import refused
from test_kv_layout import batches, rows_of
from test_readme import README

from g5cp_vec.cli._kv_layout_output import LONGEST_CELL, SPLIT_COLUMNS
from g5cp_vec.mapping.kv_layout import KVLayout, Placement

SPLIT = ("kv-layout", "--split")
CONTEXT = ("kv-layout", "--context-len")
PLACES = "token,virtual_block,offset_in_virtual_block,target_rank,local_offset"


def csv_of(*args):
    result = invoke("kv-layout", *args, "--csv")
    assert result.exit_code == 0, result.stderr
    return list(csv.DictReader(io.StringIO(result.stdout)))


def cells_of(text):
    return [line.split() for line in text.splitlines()]


# ---- CSV ----


def test_slot_mapping_of_the_oracle():
    sizes = ("block_size", "cp_size", "interleave")
    cases = {}
    for row in rows_of("slot_mapping.csv"):
        cases.setdefault(tuple(row[size] for size in sizes), []).append(row)
    assert len(cases) == 3
    for (block_size, shards, interleave), rows in cases.items():
        options = ("--block-size", block_size, "--kv-shards", shards, "--interleave", interleave)
        printed = csv_of("--context-len", 1101, *options)
        assert list(printed[0]) == PLACES.split(",")
        assert [row["token"] for row in printed] == [str(token) for token in range(1101)]
        for row in rows:
            assert printed[int(row["token"])] == {name: row[name] for name in printed[0]}


def test_splits_of_the_oracle():
    rows = rows_of("head_tail.csv")
    assert [name for name in rows[0] if name != "case"] == list(SPLIT_COLUMNS)
    printed = {}
    for row in rows:
        batch = ("--tokens", row["scheduled_tokens"].replace(" ", ","), "--pcp", row["pcp"])
        if batch not in printed:
            printed[batch] = csv_of("--split", *batch, "--decodes", row["num_decode_reqs"])
            assert list(printed[batch][0]) == list(SPLIT_COLUMNS)
            assert len(printed[batch]) == int(row["pcp"])
        mine = printed[batch][int(row["rank"])]
        assert {name: mine[name] for name, cell in row.items() if cell and name != "case"} == {
            name: cell for name, cell in row.items() if cell and name != "case"
        }
    assert len(printed) == 5


def test_split_with_a_decode_request_by_hand():
    rows = csv_of("--split", "--tokens", "1,5,8", "--decodes", 1, "--pcp", 2)
    assert list(rows[1].values()) == [
        "1 5 8", "1", "2", "1", "2 8 8", "1 4 4", "0 | 2 3 4 5 | 2 3 4 5", "8", "1",
        # The decode token alone; queries 2, 3 and 4 of five; queries 2 to 5 of eight.
        str(1 + (3 + 4 + 5) + (3 + 4 + 5 + 6)),
        "0 9 1 2 10 11 12 13 3 4 5 6 14 15 16 17 7 8", "101111100011111111",
        "req0[0:1]; req1[2:4]; req1[4:5]; req2[2:4]; req2[4:6]", "8", "8",
        # Rank 0 holds the decode token, 6 7 of req2, 0 1 of req1, 0 1 of req2 and a pad.
        "0 3 4 9 10 11 5 6 12 13 14 15 1 2",
    ]  # fmt: skip


@settings(max_examples=20)
@given(batches())
def test_forms_are_columns_of_the_whole(case):
    tokens, pcp, n_decodes = case
    batch = ("--tokens", ",".join(map(str, tokens)), "--pcp", pcp, "--decodes", n_decodes)
    whole, padded, virtual = (csv_of("--split", *batch, *form) for form in ([], ["--padded"], ["--unpadded"]))
    assert not any("virtual" in name for name in padded[0])
    assert not any("padded" in name for name in virtual[0])
    assert set(padded[0]) | set(virtual[0]) == set(whole[0])
    for part in (padded, virtual):
        assert part == [{name: row[name] for name in part[0]} for row in whole]


def test_long_contexts_pass_in_pieces():
    text = invoke(*CONTEXT, "600000", "--kv-shards", 3, "--csv").stdout
    assert text.startswith(PLACES + "\n")
    frame = pl.read_csv(io.StringIO(text))
    assert frame["token"].to_list() == list(range(600_000))
    where = KVLayout(3).place(frame["token"].to_numpy())
    for name in Placement._fields:
        assert (frame[name].to_numpy() == getattr(where, name)).all()


def test_cells_fit_csv_readers():
    # csv.DictReader, as it is, would refuse what is longer.
    result = invoke(*SPLIT, "--tokens", LONGEST_CELL, "--pcp", 8, "--csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert rows[0]["padded_form_unpad_mask"] == "1" * LONGEST_CELL
    assert rows[7]["padded_form_positions(head+tail,per req)"].split()[8191:8193] == ["65535", "65536"]
    assert rows[0]["padded_form_restore_idx"] == rows[0]["virtual_batch_form_restore_idx"] == ""
    assert "left empty without --long-cells: padded_form_restore_idx; virtual_batch_form_restore_idx" in result.stderr
    assert invoke(*SPLIT, "--tokens", "1K", "--pcp", 8, "--csv").stderr == ""


def test_long_cells_are_written_on_demand():
    n, pcp = 2 * LONGEST_CELL, 8
    result = invoke(*SPLIT, "--tokens", n, "--pcp", pcp, "--csv", "--long-cells")
    usual = csv.field_size_limit(2**24)
    try:
        rows = list(csv.DictReader(io.StringIO(result.stdout)))
    finally:
        csv.field_size_limit(usual)
    assert result.stderr == ""
    chunk, place_of = n // (2 * pcp), {}
    for rank in range(pcp):
        own = [*range(rank * chunk, (rank + 1) * chunk), *range((15 - rank) * chunk, (16 - rank) * chunk)]
        assert rows[rank]["padded_form_positions(head+tail,per req)"] == " ".join(map(str, own))
        place_of |= {token: rank * 2 * chunk + place for place, token in enumerate(own)}
    restored = " ".join(str(place_of[token]) for token in range(n))
    assert {row["padded_form_restore_idx"] for row in rows} == {restored}
    assert {row["padded_form_unpad_mask"] for row in rows} == {"1" * n}
    assert all(len(row["virtual_batch_form_restore_idx"].split()) == n for row in rows)


def test_enormous_batches_make_no_arrays():
    rows = csv_of("--split", "--tokens", "2047M", "--pcp", 2)
    n = 2047 * 2**20
    assert sum(int(row["causal_qk_pairs_real"]) for row in rows) == n * (n + 1) // 2
    assert rows[0]["virtual_batch_form_segments"] == f"req0[{3 * n // 4}:{n}]; req0[0:{n // 4}]"


# ---- tables and pictures ----


def test_context_table_by_hand():
    text = invoke(*CONTEXT, 40, "--block-size", 8, "--kv-shards", 3, "--interleave", 2).stdout
    cells = cells_of(text)
    assert ["0", "█··█··█··█··|█··█··█·"] in cells
    assert ["2", "··█··█··█··█|··█··█··"] in cells
    assert ["1", "14", "2", "39", "2", "2-3", "8-9", "…", "20-21", "26-27", "32-33", "38-39"] in cells
    assert ["allocated", "on", "every", "rank,", "2", "blocks", "16"] in cells
    assert ["allocated", "on", "all", "ranks", "and", "not", "filled", "8"] in cells


def test_ranks_without_tokens_are_shown():
    cells = cells_of(invoke(*CONTEXT, 100, "--kv-shards", 4, "--interleave", 128).stdout)
    assert ["0", "100", "0", "99", "1", "0-99"] in cells
    assert ["3", "0", "-", "-", "0", "-"] in cells


def test_long_contexts_are_summarised():
    text = invoke(*CONTEXT, "1M", "--kv-shards", 64).stdout
    assert len(text.splitlines()) < 40
    assert "█" not in text
    cells = cells_of(text)
    assert cells[-2][:5] == ["63", "16384", "63", "1048575", "128"]
    (virtual_block,) = (row for row in cells if row[:2] == ["virtual", "block,"])
    assert virtual_block[-1] == "8192"


def test_split_table_by_hand():
    text = invoke(*SPLIT, "--tokens", "1,5,8", "--decodes", 1, "--pcp", 2).stdout
    cells = cells_of(text)
    assert ["req0", "decode", "1", "-", "2", "1"] in cells
    assert ["req1", "prefill", "5", "2", "8", "4"] in cells
    assert ["req1", "00|11|1·|··"] in cells
    assert ["req2", "00|11|11|00"] in cells
    assert "0 req0 0, req2 6-7, req1 0-1, req2 0-1 7 22 8 2 9" in [" ".join(row) for row in cells]
    assert "padded_form_restore_idx: 0 9 1 2 10 11 12 13 3 4 5 6 14 15 16 17 7 8" in text
    assert "virtual_batch_form_restore_idx: 0 3 4 9 10 11 5 6 12 13 14 15 1 2" in text


@pytest.mark.parametrize(("form", "other"), [("--padded", "virtual"), ("--unpadded", "padded")])
def test_split_table_of_one_form(form, other):
    text = invoke(*SPLIT, "--tokens", "5,8", "--pcp", 2, form).stdout
    assert other not in text
    assert "restore_idx" in text


def test_large_batches_are_summarised():
    text = invoke(*SPLIT, "--tokens", ",".join(["1"] * 30 + ["128K"] * 30), "--decodes", 30, "--pcp", 64).stdout
    assert len(text.splitlines()) < 50
    assert "restore" not in text


# ---- refusals ----


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("", "--context-len: missing"),
        ("--context-len 8", "--kv-shards: missing"),
        ("--context-len 0 --kv-shards 2", "--context-len: expected a number of tokens from 1"),
        ("--context-len -5 --kv-shards 2", "--context-len: expected a number of tokens from 1"),
        ("--context-len 8 --kv-shards 0", "--kv-shards: expected an integer from 1"),
        ("--context-len 8 --kv-shards two", "--kv-shards: expected an integer from 1"),
        ("--context-len 8 --kv-shards 2 --block-size 0", "--block-size: expected an integer from 1"),
        ("--context-len 8 --kv-shards 2 --interleave 0", "--interleave: expected an integer from 1"),
        ("--context-len 8 --kv-shards 2 --interleave 3", "block_size = 128, interleave = 3"),
        ("--context-len 8 --kv-shards 2 --pcp 2", "--pcp: only with --split"),
        ("--context-len 8 --kv-shards 2 --unpadded", "--unpadded: only with --split"),
        ("--split", "--tokens: missing"),
        ("--split --tokens 4", "--pcp: missing"),
        ("--split --tokens 4 --pcp 0", "--pcp: expected an integer from 1"),
        ("--split --tokens 4,0 --pcp 2", "--tokens: expected a number of tokens from 1"),
        ("--split --tokens 4,,5 --pcp 2", "--tokens: expected a number of tokens from 1"),
        ("--split --tokens 4 --pcp 2 --decodes 2", "decodes = 2: expected 0 to 1"),
        ("--split --tokens 4 --pcp 2 --decodes -1", "--decodes: expected an integer from 0"),
        ("--split --tokens 1024M,1024M --pcp 2", "more than 2147483647 tokens"),
        ("--split --tokens 4 --pcp 2 --context-len 4", "--context-len: not with --split"),
        ("--split --tokens 4 --pcp 2 --interleave 1 --block-size 4", "--block-size, --interleave: not with --split"),
        ("--split --tokens 4 --pcp 2 --padded --unpadded", "give one of them"),
        ("--context-len 8 --kv-shards 2 --long-cells", "--long-cells: only with --split --csv"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--csv"]])
def test_wrong_input_is_one_line(args, text, form):
    result = invoke("kv-layout", *args.split(), *form)
    line = refused(result)
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    assert text in line
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--split --tokens 4 --pcp 2 --long-cells", "--long-cells: only with --split --csv"),
        ("--split --tokens 2047M --pcp 2 --csv --long-cells", "expected at most 16777216 rows times ranks"),
    ],
)
def test_long_cells_have_bounds(args, text):
    result = invoke("kv-layout", *args.split())
    assert text in refused(result)
    assert result.stdout == ""


def test_readme_names_columns_and_options():
    for name in (*SPLIT_COLUMNS, *PLACES.split(",")):
        assert f"`{name}`" in README
    section = README[README.index("## Where tokens live") : README.index("## Result columns")]
    for option in re.findall(r"--[a-z][a-z-]+", invoke("kv-layout", "--help").stdout):
        assert option in section or option == "--help"
