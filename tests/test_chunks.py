"""Chunked prefill: the sum of its passes, the memory of its largest one, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import g5cp_vec
from g5cp_vec.config.expansion import MOST_PASSES
from g5cp_vec.config.grid import load_grid
from g5cp_vec.mapping.memory import MemoryModel
from g5cp_vec.runner.passes import Point, split_passes
from g5cp_vec.runner.schema import KPIS

BASE = {"model": "llama-3.1-8b", "chip": "h200-sxm", "topology": "hgx-8", "phase": "prefill", "tp": 2}
SUMMED = (
    "ttft_s", "step_s", "compute_s", "attention_s", "overhead_s", "comm_s", "exposed_comm_s", "n_ops", "n_events",
    "tp_bytes",
)  # fmt: skip
RING = ("ring_s", "ring_compute_s", "ring_comm_s", "passkv_bytes")


def run(**keys):
    keys = {**BASE, **keys}
    keys.setdefault("n_chips", keys["tp"] * keys["cp"])
    result = g5cp_vec.run({"fixed": keys})
    assert [getattr(result, kpi) for kpi in KPIS] in ([0] * 6, [None] * 6)
    return result


@pytest.mark.parametrize(
    ("cp", "seq_len", "cached", "chunk"),
    [(1, 10_000, 0, 4096), (2, 10_000, 1000, 4096), (3, 8192, 0, 8192), (2, 8192, 8191, 16)],
)
def test_a_chunked_prefill_is_the_sum_of_its_passes(cp, seq_len, cached, chunk):
    whole = run(cp=cp, seq_len=seq_len, cached_tokens=cached, chunk_tokens=chunk)
    passes, begin = [], cached
    while begin < seq_len:
        end = min(begin + chunk, seq_len)
        passes.append(run(cp=cp, seq_len=end, cached_tokens=begin))
        begin = end
    for name in SUMMED + (RING if cp > 1 else ()):
        assert getattr(whole, name) == pytest.approx(sum(getattr(p, name) for p in passes), rel=1e-12), name
    assert whole.overlap_ratio == pytest.approx(1 - whole.exposed_comm_s / whole.comm_s, rel=1e-12)
    assert whole.peak_bytes == max(p.peak_bytes for p in passes)
    assert whole.padded_seq_len == max(p.padded_seq_len for p in passes)
    assert whole.chunk_tokens == chunk
    # Whatever the chunks, the model needs as many FLOPs.
    once = run(cp=cp, seq_len=seq_len, cached_tokens=cached)
    assert whole.mfu * whole.ttft_s == pytest.approx(once.mfu * once.ttft_s, rel=1e-12)
    if cp > 1:
        assert whole.peak_ring_blocks == max(p.peak_ring_blocks for p in passes)


def test_closed_form_in_chunks():
    keys = {"cp": 1, "topology": "flat-450", "seq_len": 30_000, "chunk_tokens": 8192}
    simulated, closed = run(**keys), run(**keys, path="math")
    assert closed.ttft_s == pytest.approx(simulated.ttft_s, rel=1e-9)
    assert closed.tp_bytes == simulated.tp_bytes


def test_one_chunk_is_no_chunk():
    one, none = run(cp=2, seq_len=8192, chunk_tokens=8192), run(cp=2, seq_len=8192)
    ignored = ("point_id", "chunk_tokens", "max_seq_len")
    assert {k: v for k, v in one.to_dict().items() if k not in ignored} == {
        k: v for k, v in none.to_dict().items() if k not in ignored
    }
    assert one.point_id != none.point_id


def test_decode_knows_no_chunks():
    keys = {"cp": 2, "seq_len": 8192, "phase": "decode"}
    assert run(**keys, chunk_tokens=16).tpot_s == run(**keys).tpot_s


def test_chunks_as_an_axis():
    """Rows of one and of several passes in one batch, each as if alone."""
    grid = {
        "fixed": {**BASE, "n_chips": 4, "cp": 2},
        "axes": {"chunk_tokens": [0, "2K", 5000], "seq_len": ["4K", "12K"]},
    }
    rows = g5cp_vec.sweep(grid)
    for row in rows.iter_rows(named=True):
        alone = run(cp=2, seq_len=row["seq_len"], chunk_tokens=row["chunk_tokens"])
        assert {k: v for k, v in row.items() if k not in ("row", *KPIS)} == {
            k: v for k, v in alone.to_dict().items() if k not in ("row", *KPIS)
        }


@pytest.mark.parametrize("cp", [1, 4])
@pytest.mark.parametrize("chunk", [1000, 8192])
def test_longest_context_in_chunks(cp, chunk):
    """The last that fits fits and the next does not, by the memory of all of their passes."""
    grid = {"name": "g", "fixed": {**BASE, "n_chips": 2 * cp, "cp": cp, "seq_len": 8192}}
    dep = load_grid(grid, point=True).expand().deployments[0]
    model = MemoryModel(dep)
    longest = model.max_seq_len(1, 0, chunk)

    def peak(seq_len):
        point = Point(*(np.array([v]) for v in (seq_len, 1, 0, chunk)))
        return model.at(*split_passes(dep, point).load).peak_bytes.max()

    assert peak(longest) <= model.usable_bytes < peak(longest + 1)
    assert longest > model.max_seq_len(1, 0)


def test_too_many_passes_are_refused():
    rows = g5cp_vec.sweep({"fixed": {**BASE, "n_chips": 2, "cp": 1, "seq_len": MOST_PASSES + 1, "chunk_tokens": 1}})
    assert rows["reason"][0] == (
        f"{MOST_PASSES + 1} tokens in steps of 1 (chunk_tokens or max_num_batched_tokens) are more than "
        f"{MOST_PASSES} passes: let a step have more"
    )
