"""The bytes of K and V that go around a ring, from the graph and in the result."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_acceptance_tools import GQA, MHA, MLA, bytes_of_ops, deploy, one_point, ops_of, priced, small_model

from g5cp_vec.engine.arrays import FLOW
from g5cp_vec.mapping.structure import build_structure

BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4}
MODELS = {"mha": small_model(attention=MHA), "gqa": small_model(attention=GQA), "mla": small_model(attention=MLA)}
# Elements per token and layer that one of tp shards caches: K and V of its heads (at least one), or the whole latent.
ELEMENTS = {
    "mha": {1: 2 * 8 * 16, 2: 2 * 4 * 16, 4: 2 * 2 * 16, 8: 2 * 1 * 16},
    "gqa": {1: 2 * 2 * 16, 2: 2 * 1 * 16, 4: 2 * 1 * 16, 8: 2 * 1 * 16},  # 2 heads: replicated beyond tp = 2
    "mla": dict.fromkeys((1, 2, 4, 8), 32 + 8),
}


def padded(new, cached, cp):
    """Tokens that go around: the new ones in 2 cp equal chunks, the cached ones in cp equal parts."""
    while new % (2 * cp):
        new += 1
    while cached % cp:
        cached += 1
    return new + cached


def sent_per_rank_and_layer(structure, rows):
    """Bytes of the ring that each (chip, layer) sends, summed over the graph's flows."""
    ops, n_bytes = structure.ops, bytes_of_ops(structure, rows)
    sent = defaultdict(int)
    for op in ops_of(ops, "cp_pass_kv", FLOW):
        sent[int(ops.op_src[op]), int(ops.op_layer[op])] += n_bytes[op]
    return sent


def assert_passkv_bytes(name, tp, cp, kv_dtype, batch, seq_len, cached, pp=1, dp=1):
    dep = deploy(model=MODELS[name], tp=tp, cp=cp, pp=pp, dp=dp, kv_dtype=kv_dtype)
    structure = build_structure(dep)
    sent = sent_per_rank_and_layer(structure, priced(dep, structure, seq_len, batch, cached))
    c_kv = Fraction(ELEMENTS[name][tp] * BITS[kv_dtype], 8)
    expected = batch * (cp - 1) * Fraction(padded(seq_len - cached, cached, cp), cp) * c_kv
    # Every rank of the layer's stage, and nobody else.
    assert len(sent) == dp * cp * tp * dep.model.n_layers
    assert set(sent.values()) == {expected}


TABLE = [
    # name, tp, cp, kv dtype, batch, S, cached
    ("mha", 1, 2, "bf16", 1, 64, 0),
    ("mha", 4, 8, "fp8", 3, 4096, 0),
    ("gqa", 1, 4, "bf16", 2, 1000, 0),  # 1000 = 125 * 8
    ("gqa", 1, 4, "bf16", 2, 1001, 0),  # padded to 1008
    ("gqa", 8, 3, "fp4", 1, 1, 0),  # one token is padded to 6
    ("mla", 2, 16, "bf16", 1, 2**20, 0),
    ("mla", 8, 7, "int8", 5, 12345, 0),
    ("mha", 2, 4, "int4", 2, 300, 101),  # 199 new -> 200, 101 cached -> 104
    ("mla", 1, 5, "fp16", 1, 1023, 1022),  # one new -> 10, 1022 cached -> 1025
]


@pytest.mark.parametrize("case", TABLE, ids=lambda c: "-".join(map(str, c)))
def test_passkv_bytes_conserved(case):
    """A rank sends b (cp - 1) (S / cp) c_kv bytes per layer, S padded."""
    assert_passkv_bytes(*case)


def test_passkv_bytes_conserved_by_hand():
    # cp = 4, S = 1000 -> 1000 (divisible by 8), 250 tokens a rank; c_kv = 2 heads * 2 * 16 * 2 bytes = 128 bytes;
    # b = 2: 2 * 3 * 250 * 128 = 192,000 bytes. With 1001 tokens: 1008 -> 252 tokens, 193,536 bytes.
    for seq_len, expected in ((1000, 192_000), (1001, 193_536)):
        dep = deploy(model=MODELS["gqa"], cp=4)
        structure = build_structure(dep)
        sent = sent_per_rank_and_layer(structure, priced(dep, structure, seq_len, 2))
        assert set(sent.values()) == {expected}


@given(
    name=st.sampled_from(["mha", "gqa", "mla"]),
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.integers(2, 9),
    kv_dtype=st.sampled_from(sorted(BITS)),
    batch=st.integers(1, 5),
    lengths=st.tuples(st.integers(1, 5000), st.integers(0, 5000)),
    pp=st.integers(1, 2),
    dp=st.integers(1, 2),
)
def test_passkv_bytes_conserved_everywhere(name, tp, cp, kv_dtype, batch, lengths, pp, dp):
    new, cached = lengths
    assert_passkv_bytes(name, tp, cp, kv_dtype, batch, new + cached, cached, pp, dp)


@pytest.mark.parametrize(
    ("model", "tp", "elements", "n_layers"),
    [
        ("llama-3.1-8b", 2, 2 * 4 * 128, 32),  # 8 KV heads over 2 shards
        ("qwen3-235b-a22b", 8, 2 * 1 * 128, 94),  # 4 KV heads over 8 shards: one each, replicated
        ("deepseek-v3-671b", 4, 512 + 64, 61),  # the whole latent on every shard
    ],
)
def test_passkv_bytes_conserved_in_the_result(model, tp, elements, n_layers):
    """The column is the per-layer figure times the layers, padding included and reported."""
    row = one_point(
        phase="prefill", model=model, chip="h200-sxm", topology="flat-450", n_chips=4 * tp, tp=tp, cp=4, batch=2,
        seq_len=100_001, kv_dtype="fp8",
    )  # fmt: skip
    # 100,001 tokens -> 100,008 = 12,501 * 8.
    assert row["padded_seq_len"] == 100_008
    assert row["passkv_bytes"] == n_layers * 2 * 3 * (100_008 // 4) * elements


def test_the_result_says_how_long_the_padded_context_is():
    """Prefill: multiples of 2 cp (new) and cp (cached). Decode attends S tokens, in cp equal shards. cp 1: S itself."""
    fixed = {"model": "llama-3.1-8b", "chip": "h200-sxm", "topology": "flat-450", "n_chips": 4, "seq_len": 1001}
    for phase, cached, cp, expected in (
        ("prefill", 0, 1, 1001),
        ("prefill", 0, 4, 1008),
        ("prefill", 10, 4, 992 + 12),  # 991 -> 992, 10 -> 12
        ("decode", 0, 1, 1001),
        ("decode", 0, 4, 1004),
    ):
        row = one_point(**fixed, phase=phase, cp=cp, cached_tokens=cached)
        assert row["padded_seq_len"] == expected, (phase, cp)


def test_a_lost_or_a_doubled_block_would_be_seen():
    dep = deploy(model=MODELS["mla"], cp=4)
    structure = build_structure(dep)
    rows = priced(dep, structure, 512)
    right = set(sent_per_rank_and_layer(structure, rows).values())
    assert len(right) == 1
    rows.bytes[0, structure.keys.bytes["cp_pass_kv", 0]] += 1
    assert set(sent_per_rank_and_layer(structure, rows).values()) == {right.pop() + 3}
