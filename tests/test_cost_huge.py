"""Very large points: exact where bytes are promised, finite where seconds are, refused where neither is possible."""

from __future__ import annotations

import math

import pytest
from test_acceptance_tools import GQA, PRESETS, deploy, one_point, small_model, write_model

from g5cp_vec import sweep
from g5cp_vec.cost.rows import parts_by_key
from g5cp_vec.errors import ConfigError
from g5cp_vec.mapping.load import build_load

MOST_TOKENS = 2**36  # of all replicas at once: beyond, points are refused
FIXED = {"chip": "h200-sxm", "topology": "flat-450", "n_chips": 8, "phase": "prefill"}
BYTES = ("kv_bytes", "weight_bytes", "activation_bytes", "buffer_bytes", "peak_bytes", "passkv_bytes",
         "passq_query_bytes", "passq_reduce_bytes", "tp_bytes", "ep_bytes", "pp_bytes")  # fmt: skip


def assert_sound(row):
    """Nothing negative, nothing infinite, no time without work."""
    for name in BYTES:
        assert row[name] is None or row[name] >= 0, name
    parts = [row[f"{part}_bytes"] for part in ("weight", "kv", "activation", "buffer")]
    assert row["peak_bytes"] == sum(parts)
    for name, value in row.items():
        if isinstance(value, float):
            assert math.isfinite(value), name
            assert value >= 0, name
    assert row["step_s"] > 0
    assert row["fits"] == (row["status"] == "ok")


@pytest.mark.parametrize("model", ["llama-3.1-405b", "deepseek-v3-671b", "qwen3-235b-a22b"])
@pytest.mark.parametrize(("tp", "cp"), [(8, 1), (1, 8), (2, 4)])
def test_the_longest_contexts_are_counted_exactly(model, tp, cp):
    """2^36 tokens in one sequence: every byte column is the exact product."""
    row = one_point(**FIXED, model=model, tp=tp, cp=cp, seq_len=MOST_TOKENS, ep=tp)
    assert_sound(row)
    assert row["status"] == "oom"
    elements, layers, hidden = {
        "llama-3.1-405b": (2 * max(1, 8 // tp) * 128, 126, 16_384),
        "deepseek-v3-671b": (576, 61, 7168),
        "qwen3-235b-a22b": (2 * max(1, 4 // tp) * 128, 94, 4096),
    }[model]
    share = MOST_TOKENS // cp
    assert row["kv_bytes"] == layers * share * elements * 2
    if cp > 1:
        assert row["passkv_bytes"] == layers * (cp - 1) * share * elements * 2
    if tp > 1:
        # Two all-reduces a layer, 2 (tp - 1) chunks of share * hidden * 2 / tp bytes each.
        assert row["tp_bytes"] == layers * 2 * 2 * (tp - 1) * share * hidden * 2 // tp


def test_time_grows_as_it_should_up_to_the_longest_context():
    """Attention of llama grows with S^2: a thousand times the tokens, nearly a million times the time."""
    short = one_point(**FIXED, model="llama-3.1-8b", cp=8, seq_len=2**26)
    long = one_point(**FIXED, model="llama-3.1-8b", cp=8, seq_len=2**36)
    assert long["attention_s"] / short["attention_s"] == pytest.approx(2**20, rel=1e-3)


def test_flops_beyond_64_bits_are_exact_as_integers():
    """Llama-3.1-405B, 2^36 tokens: 2 * 128 heads * 256 * 2^71 = 2^87 FLOPs a layer."""
    dep = deploy(model=PRESETS["llama-3.1-405b"])
    parts = parts_by_key(dep, build_load(dep, 2**36, 1, 0))
    assert parts["attention", 0][0].flops == 2**87
    assert parts["qkv", 0][1].flops == 2 * 2**36 * 16_384 * (128 + 16) * 128


def test_large_batches_and_replicas():
    row = one_point(
        chip="h200-sxm", topology="flat-450", model="llama-3.1-405b", phase="decode", n_chips=16, tp=8, cp=1,
        batch=2**20, seq_len=2**15,
    )  # fmt: skip
    assert_sound(row)
    assert row["kv_bytes"] == 126 * 2**20 * 2**15 * 256 * 2
    assert row["tp_bytes"] == 126 * 2 * 2 * 7 * (2**20 * 16_384 * 2 // 8)


@pytest.mark.parametrize("keys", [{"seq_len": MOST_TOKENS + 8}, {"seq_len": 2**40}, {"seq_len": 2**30, "batch": 128}])
def test_more_tokens_are_refused_with_a_reason(keys):
    grid = {"name": "t", "fixed": {**FIXED, "model": "llama-3.1-8b", "cp": 8, **keys}}
    (row,) = sweep(grid, audit="none").to_dicts()
    assert row["status"] == "invalid"
    assert str(MOST_TOKENS) in row["reason"]
    assert row["peak_bytes"] is None


def sound_row_or_none(fixed):
    """The row, checked; None where the point or the model is refused in words."""
    try:
        (row,) = sweep({"name": "t", "fixed": fixed}, audit="none").to_dicts()
    except ConfigError:
        return None
    if row["status"] == "invalid":
        assert row["reason"]
        return None
    assert_sound(row)
    return row


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("seq_len", [2**20, 2**36])
@pytest.mark.parametrize("log_hidden", [14, 20, 24, 40])
def test_absurdly_wide_models_are_refused_or_right(tmp_path, phase, seq_len, log_hidden):
    """No model has a hidden size of 2^20, but a typing error has: it must not wrap around into a point that fits."""
    if log_hidden == 40:
        with pytest.raises(ValueError, match="parameters"):
            small_model(name="wide", hidden=2**log_hidden, d_ff=2 ** (log_hidden + 2), vocab=2**20)
        return
    model = small_model(name="wide", hidden=2**log_hidden, d_ff=2 ** (log_hidden + 2), vocab=2**20)
    path = write_model(tmp_path, model)
    row = sound_row_or_none({**FIXED, "model": path, "n_chips": 1, "cp": 1, "phase": phase, "seq_len": seq_len})
    # What there is today, at lengths that are served, is never refused.
    assert row is not None or log_hidden > 14 or seq_len > 2**20
    if row is not None:
        tokens = seq_len if phase == "prefill" else 1
        # 2 hidden + gate and up (2 * 4 hidden): 10 hidden elements a token.
        assert row["activation_bytes"] == tokens * 10 * 2**log_hidden * 2
        assert row["fits"] == (row["peak_bytes"] <= int(141 * 2**30 * 0.9))


def test_a_link_may_carry_more_than_a_rank_sends(tmp_path):
    """16 chips of each node share one NIC: what it carries leaves int64, what each rank sends does not."""
    (tmp_path / "net.toml").write_text(
        'kind = "hgx"\nnode_size = 16\nscale_up_gbytes_per_s = 450.0\nscale_up_latency_us = 0.0\n'
        "nics_per_node = 1\nnic_gbytes_per_s = 50.0\nscale_out_latency_us = 0.0\n"
    )
    heads = GQA.model_copy(update={"n_heads": 32, "n_kv_heads": 32})
    model = small_model(name="broad", hidden=2**17, d_ff=2**10, n_layers=24, attention=heads)
    row = one_point(
        chip="h200-sxm", model=write_model(tmp_path, model), phase="prefill", topology=str(tmp_path / "net.toml"),
        n_chips=32, tp=32, cp=1, collective="direct", seq_len=MOST_TOKENS,
    )  # fmt: skip
    assert_sound(row)
    # 16 * 16 pairs across in each direction, 2 messages in each of 2 all-reduces of 24 layers, chunks of
    # 2^36 * 2^17 * 2 / 32 = 2^49 bytes: 1.5 * 2^63 in all.
    carried = 16 * 16 * 4 * 24 * 2**49
    assert carried > 2**63 > row["tp_bytes"] == 4 * 24 * 31 * 2**49
    assert "nic0" in row["bottleneck_link"]
    assert row["bottleneck_utilisation"] == pytest.approx(carried / 50e9 / row["step_s"], rel=1e-9)
