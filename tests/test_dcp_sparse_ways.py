"""Sparse attention under pcp, and under orthogonal dcp: bytes, work, memory, programs, audits.

Figures from the tensor shapes of vllm-ascend v0.23 (block by block) and of vLLM (pull requests 46570, 46076, 56157),
written out here once more.
"""

from __future__ import annotations

import numpy as np
import pytest
from checks import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dcp_bytes import DEEPSEEK, deploy, sent
from test_dcp_forms import ALGORITHMS, TOPOLOGIES, assert_sound, build, names, order
from test_dcp_sparse import BESIDE, MIXED, SMALL
from test_reduction import assert_reduced_equals_full

from g5cp_vec.config.model import Indexer
from g5cp_vec.cost.rows import cost_rows, parts_by_key
from g5cp_vec.mapping.load import build_load
from g5cp_vec.mapping.memory import MemoryModel

MIB = 2**20
ASCEND, VLLM = {"cp_semantics": "multiplicative"}, {"cp_semantics": "orthogonal"}


def large(**changes):
    """One layer like those of DeepSeek-V3.2: 128 heads, 64 heads of the indexer with keys of 128 elements in fp8."""
    attention = DEEPSEEK.attention.model_copy(update={"indexer": Indexer(n_heads=64, head_dim=128, top_k=2048)})
    model = DEEPSEEK.model_copy(update={"n_layers": 1, "first_dense": 0, "attention": attention})
    return deploy(**{"model": model, "tp": 8} | changes)


def of_attention(found):
    return {name: value for name, value in found.items() if name[:3] in ("pcp", "dcp") and name != "pcp_hidden"}


# --- Hand-derived figures ---------------------------------------------------------------------------------------------


def test_ascend_prefill_of_131072_tokens():
    """Tp 8, pcp 2, dcp 8: 65536 rows a rank; 64 blocks of 128 tokens on each of 16 shards."""
    found = of_attention(sent(large(pcp=2, dcp=8, **ASCEND), 131072))
    blocks = 64 * 128
    sizes = {
        "pcp_kv": (65536 * 576 * 2, 1),
        "pcp_index": (65536 * 128 * 2, 1),
        "dcp_index_blocks": (blocks * 132, 7),
        "pcp_index_blocks": (8 * blocks * 132, 1),
        "dcp_latent_blocks": (blocks * 512 * 2, 7),
        "pcp_latent_blocks": (8 * blocks * 512 * 2, 1),
        "dcp_rope_blocks": (blocks * 64 * 2, 7),
        "pcp_rope_blocks": (8 * blocks * 64 * 2, 1),
    }
    assert found == {name: (size, n * size) for name, (size, n) in sizes.items()}
    assert found["pcp_kv"][0] == 72 * MIB
    assert found["pcp_latent_blocks"][0] == 64 * MIB


def test_ascend_decode_grows_with_the_context():
    """Every entry of the block table: 2 sequences of 131072 and of 262144 tokens over two shards."""
    found = of_attention(sent(large(pcp=2, phase="decode", **ASCEND), 131072, batch=2))
    assert found == {
        "pcp_kv": (2 * 576 * 2, 2 * 576 * 2),
        "pcp_index": (2 * 128 * 2, 2 * 128 * 2),
        "pcp_index_blocks": (131072 * 132, 131072 * 132),
        "pcp_latent_blocks": (128 * MIB, 128 * MIB),
        "pcp_rope_blocks": (16 * MIB, 16 * MIB),
    }
    longer = of_attention(sent(large(pcp=2, phase="decode", **ASCEND), 262144, batch=2))
    assert longer["pcp_latent_blocks"][0] == 2 * found["pcp_latent_blocks"][0]
    assert longer["pcp_kv"] == found["pcp_kv"]


def test_vllm_prefill_with_copies():
    """Orthogonal, pcp alone: latents, rotary parts and keys of the indexer of 65536 rows; decode sends nothing."""
    found = of_attention(sent(large(pcp=2, **VLLM), 131072))
    rows = 65536 * 2
    assert {name: size for name, (size, _) in found.items()} == {
        "pcp_kv": rows * 512, "pcp_kv_rest": rows * 64, "pcp_index": rows * 128,
    }  # fmt: skip
    assert of_attention(sent(large(pcp=2, phase="decode", **VLLM), 131072)) == {}


def test_vllm_prefill_of_gathered_shards():
    """Orthogonal, dcp over all 16 ranks: 8192 tokens of each shard, widened to bf16; keys as they are cached."""
    for dtype in ("bf16", "fp8"):
        found = of_attention(sent(large(pcp=2, dcp=16, kv_dtype=dtype, **VLLM), 131072))
        assert found["dcp_shard"] == (9 * MIB, 15 * 9 * MIB)
        assert found["dcp_index_shard"] == (8192 * 132, 15 * 8192 * 132)
    assert set(found) == {"pcp_kv", "pcp_kv_rest", "pcp_index", "dcp_index_shard", "dcp_shard"}


def test_vllm_prefill_of_merged_choices():
    """Orthogonal, dcp 8 alone: 2048 candidates of 8 bytes a row, then queries and answers of 8192 rows."""
    found = of_attention(sent(large(dcp=8, **VLLM), 8192))
    assert found == {
        "dcp_choice": (128 * MIB, 7 * 128 * MIB),
        "dcp_q": (144 * MIB, 7 * 144 * MIB),
        "dcp_lse": (4 * MIB, 7 * 4 * MIB),
        "dcp_out": (128 * MIB, 7 * 128 * MIB),
    }


@pytest.mark.parametrize("form", ["dcp_ag_rs", "dcp_a2a"])
def test_vllm_decode_of_merged_choices(form):
    found = of_attention(sent(large(dcp=8, phase="decode", decode_form=form, **VLLM), 131072))
    assert found["dcp_choice"] == (16_384, 7 * 16_384)
    assert found["dcp_q"] == (18_432, 7 * 18_432)
    if form == "dcp_ag_rs":
        assert found["dcp_lse"][0] == 512
        assert found["dcp_out"] == (16_384, 114_688)
    else:
        assert (8 * found["dcp_a2a"][0], found["dcp_a2a"][1]) == (131_584, 115_136)


# --- A twin of the tensor shapes --------------------------------------------------------------------------------------


def ceil(a, b):
    return -(-a // b)


def held(n, shards, run):
    """Tokens on each shard, counted."""
    return [sum(1 for x in range(n) if x // run % shards == r) for r in range(shards)]


def shapes(dep, seq_len, batch, cached):
    """Contributed bytes of every collective of a layer: 8 heads of MLA (32 + 8), an indexer's keys of 16 in fp8."""
    tp, P, C, B = dep.tp, dep.pcp, dep.dcp, dep.block_size
    h, rank, rope, di, k, key = 8 // tp, 32, 8, 16, 12, 16 + 4
    prefill, orthogonal = dep.phase == "prefill", dep.cp_semantics == "orthogonal"
    new = seq_len - cached
    found = {}
    if not orthogonal and P == 1:
        raise AssertionError("of another module")
    if not orthogonal or prefill and P > 1:
        chunk = ceil(new, 2 * P)
        lengths = [max(0, min(chunk, new - i * chunk)) for i in range(2 * P)]
        fullest = max(lengths[r] + lengths[2 * P - 1 - r] for r in range(P))
        rows = batch * (1 if not prefill else fullest if orthogonal else 2 * chunk)
        if orthogonal:
            found |= {"pcp_kv": rows * rank * 2, "pcp_kv_rest": rows * rope * 2}
        else:
            found["pcp_kv"] = rows * (rank + rope) * 2
        found["pcp_index"] = rows * di * 2
    if not orthogonal:
        n = batch * ceil(seq_len, B * P * C) * B
        for what, width in (("latent", rank * 2), ("rope", rope * 2), ("index", key)):
            found[f"pcp_{what}_blocks"] = C * n * width
            if C > 1:
                found[f"dcp_{what}_blocks"] = n * width
    elif prefill and P > 1 and C > 1:
        n = batch * max(held(seq_len, C, dep.interleave))
        found |= {"dcp_index_shard": n * key, "dcp_shard": n * (rank + rope) * 2}
    elif C > 1:
        rows = batch * (new if prefill else 1)
        found["dcp_choice"] = rows * k * 8
        gathered = C if P == 1 else 1 if C == P and tp > 1 else tp
        if gathered > 1:
            found["dcp_q"] = rows * h * (rank + rope) * 2
        if dep.decode_form == "dcp_a2a":
            return found | {"dcp_a2a": rows * h * (rank + 2) * 2}
        found |= {"dcp_lse": rows * h * gathered * 4, "dcp_out": ceil(rows * h * gathered * rank * 2, C)}
    return found


LAYOUTS = {
    "multiplicative": [(1, 2, 1), (4, 2, 1), (4, 2, 2), (4, 2, 4), (2, 3, 2), (2, 4, 2)],
    "orthogonal": [(4, 1, 2), (4, 1, 4), (8, 1, 2), (4, 2, 1), (1, 2, 1), (4, 2, 2), (2, 2, 4), (1, 2, 2), (2, 3, 6)],
}
LOADS = [(8, 1, 0), (40, 1, 0), (97, 2, 0), (1000, 3, 0), (1000, 1, 960), (4099, 2, 4000)]
CASES = [
    pytest.param(semantics, layout, phase, id=f"{semantics}-{layout}-{phase}")
    for semantics, layouts in LAYOUTS.items()
    for layout in layouts
    for phase in ("prefill", "decode")
]


@pytest.mark.parametrize(("semantics", "layout", "phase"), CASES)
def test_every_collective_sends_what_the_shapes_say(semantics, layout, phase):
    tp, pcp, dcp = layout
    runs = (16,) if semantics == "multiplicative" else (1, 8)
    for interleave in runs:
        for collective in ("ring", "direct"):
            dep = deploy(
                model=SMALL, tp=tp, pcp=pcp, dcp=dcp, cp_semantics=semantics, phase=phase, collective=collective,
                block_size=16, interleave=interleave,
            )  # fmt: skip
            for seq_len, batch, cached in LOADS:
                cached = cached if phase == "prefill" else 0
                found = of_attention(sent(dep, seq_len, batch, cached))
                wanted = shapes(dep, seq_len, batch, cached)
                assert {name: size for name, (size, _) in found.items()} == wanted
                for name, (size, wire) in found.items():
                    members = pcp if name.startswith("pcp") else tp if name == "dcp_q" and pcp > 1 else dcp
                    passes = 2 if name == "dcp_out" and pcp > 1 else 1
                    assert wire == passes * (members - 1) * size, name


def test_a_layer_that_takes_a_choice_sends_no_keys():
    for semantics, layout in (("multiplicative", (4, 2, 2)), ("orthogonal", (4, 1, 4)), ("orthogonal", (2, 2, 4))):
        tp, pcp, dcp = layout
        for phase in ("prefill", "decode"):
            dep = deploy(model=MIXED, tp=tp, pcp=pcp, dcp=dcp, cp_semantics=semantics, phase=phase, block_size=16)
            structure = build(dep, 640)
            kinds = {key[1]: set() for key in structure.keys.bytes if isinstance(key, tuple) and key[1] in (0, 1)}
            for key in structure.keys.bytes:
                if isinstance(key, tuple) and key[1] in kinds:
                    kinds[key[1]].add(key[0])
            first, second = kinds[0], kinds[1]
            of_choosing = {n for n in first if "index" in n or n == "dcp_choice"}
            assert of_choosing
            assert second == first - of_choosing


# --- Work -------------------------------------------------------------------------------------------------------------


def flops(parts, name, index=0):
    return int(parts[name, 0][index].flops)


@pytest.mark.parametrize("seq_len", [16, 24, 100, 808])
def test_ranks_score_and_attend_their_own_rows(seq_len):
    """Query by query: a row sees half of itself and all before; of the chosen no more than 12."""
    for semantics in (ASCEND, VLLM):
        dep = deploy(model=SMALL, tp=2, pcp=2, block_size=16, **semantics)
        load = build_load(dep, seq_len, 2, 8)
        parts = parts_by_key(dep, load)
        chunk = ceil(seq_len - 8, 4)
        last = 8 + 4 * chunk if semantics is ASCEND else seq_len
        for rank in range(2):
            own = [
                8 + c * chunk + i for c in (rank, 3 - rank) for i in range(chunk) if 8 + c * chunk + i < last
            ]  # fmt: skip
            seen = sum(2 * q + 1 for q in own)
            chosen = sum(min(2 * q + 1, 24) for q in own)
            name = "indexer@0" if semantics is ASCEND else f"indexer@{rank}"
            assert flops(parts, name) == 2 * 4 * (16 + 1) * seen
            assert flops(parts, f"sparse@{rank}") == 2 * 4 * (40 + 32) * chosen


@pytest.mark.parametrize("interleave", [1, 8, 16])
def test_shards_share_what_was_chosen(interleave):
    """Together all that a row chose, each as much of it as of the context, rounded up."""
    dep = deploy(model=SMALL, tp=4, dcp=4, block_size=16, interleave=interleave, **VLLM)
    for seq_len, cached in ((5, 0), (100, 0), (777, 700), (5000, 10)):
        parts = parts_by_key(dep, build_load(dep, seq_len, 3, cached))
        chosen = sum(min(2 * q + 1, 24) for q in range(cached, seq_len))
        seen = sum(2 * q + 1 for q in range(cached, seq_len))
        for shard, tokens in enumerate(held(seq_len, 4, interleave)):
            assert flops(parts, f"sparse@{shard}") == 3 * 8 * (40 + 32) * ceil(chosen * tokens, seq_len)
            assert flops(parts, f"indexer@{shard}") == 3 * 4 * (16 + 1) * ceil(seen * tokens, seq_len)


def test_arrays_and_integers_agree():
    for changes in ({"dcp": 4}, {"dcp": 8, "pcp": 2}, {"pcp": 2}):
        dep = deploy(model=SMALL, tp=4, block_size=16, **VLLM, **changes)
        lengths = np.array([16, 97, 4099])
        many = parts_by_key(dep, build_load(dep, lengths, 0 * lengths + 2, 0 * lengths))
        for at, seq_len in enumerate(lengths.tolist()):
            one = parts_by_key(dep, build_load(dep, seq_len, 2, 0))
            for key, parts in one.items():
                for part, of_many in zip(parts, many[key], strict=True):
                    assert np.broadcast_to(of_many.flops, 3)[at] == part.flops, key
                    assert np.broadcast_to(of_many.bytes, 3)[at] == part.bytes, key


def test_pcp_ranks_decode_alike():
    """Every rank scores and attends the whole context for its heads."""
    for semantics in (ASCEND, VLLM):
        dep = deploy(model=SMALL, tp=2, pcp=2, phase="decode", block_size=16, **semantics)
        parts = parts_by_key(dep, build_load(dep, 100, 3, 0))
        name = "sparse@0" if semantics is ASCEND else "shard@0"
        assert flops(parts, name) == 3 * 2 * 12 * 4 * (40 + 32)


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_caches():
    """Of 131072 tokens 1152 bytes of a latent and 132 of a key each, shared or not."""

    def kept(**changes):
        return MemoryModel(large(phase="decode", **changes)).at(131072, 1, 0).kv_bytes

    everything = 131072 * (1152 + 132)
    assert kept(pcp=2, dcp=8, **ASCEND) == everything // 16
    assert kept(pcp=2, **ASCEND) == everything // 2
    assert kept(pcp=2, **VLLM) == everything
    assert kept(dcp=8, **VLLM) == everything // 8
    assert kept(pcp=2, dcp=16, **VLLM) == everything // 16
    assert kept(dcp=8, **ASCEND) == 131072 * 1152 // 8 + 131072 * 132


def test_buffers():
    def most(seq_len, **changes):
        return MemoryModel(large(moe_dispatch="all_to_all", **changes)).at(seq_len, 1, 0).buffer_bytes

    latents, rotary = 131072 * 512 * 2, 131072 * 64 * 2
    # Own blocks, a dcp group's and all of latents, against all latents and as much of rotary parts; new keys twice.
    assert most(131072, pcp=2, dcp=8, **ASCEND) == max(
        latents * 25 // 16, latents + rotary * 25 // 16, 2 * (latents + rotary)
    )
    assert most(131072, pcp=2, **VLLM) == latents + rotary
    # A shard of 8192 tokens beside all 16 of them.
    assert most(131072, pcp=2, dcp=16, **VLLM) == (latents + rotary) * 17 // 16
    # 8192 rows of 128 heads: queries, outputs twice, log-sum-exps of all ranks.
    assert most(8192, dcp=8, **VLLM) == 8192 * 128 * (576 * 2 + 2 * 512 * 2 + 8 * 4)
    assert most(131072, phase="decode", pcp=2, **VLLM) == 0


def test_the_longest_context_follows_from_the_layout():
    shared, whole = (MemoryModel(large(phase="decode", tp=4, pcp=2, dcp=dcp, **VLLM)) for dcp in (8, 1))
    longest = shared.max_seq_len(1, 0)
    assert shared.at(longest, 1, 0).peak_bytes <= shared.usable_bytes < shared.at(longest + 1, 1, 0).peak_bytes
    assert longest > 4 * whole.max_seq_len(1, 0)


# --- Programs, audits, reductions -------------------------------------------------------------------------------------


def test_programs():
    def middle(phase="prefill", chip=0, **changes):
        dep = deploy(model=SMALL, phase=phase, block_size=16, **changes)
        first, *rest, o_proj, ffn = order(build(dep, 100), chip)
        assert (first, o_proj, ffn) == ("qkv", "o_proj", "ffn")
        return rest

    blocks = ["restore", "restore_index", "indexer@0", "select"]
    both = {"tp": 4, "pcp": 2, "dcp": 4, **ASCEND}
    assert middle(**both) == [*blocks, "sparse@0"]
    assert middle(**both, chip=4) == [*blocks, "sparse@1"]
    assert middle(**both, phase="decode", chip=4) == [*blocks, "sparse@0"]
    # 100 tokens over two ranks: chunks of 25, all full.
    assert middle(tp=4, pcp=2, **VLLM, chip=4) == ["restore_index", "indexer@0", "restore", "sparse@1"]
    shards = {"tp": 4, "pcp": 2, "dcp": 8, **VLLM}
    assert middle(**shards, chip=4) == ["restore_index", "indexer@0", "restore", "select", "sparse@1"]
    # Four shards hold 13 tokens, four 12.
    assert middle(**shards, phase="decode") == ["indexer@0", "choose", "shard@0", "rescale"]
    assert middle(**shards, phase="decode", chip=3) == ["indexer@7", "choose", "shard@7", "rescale"]
    assert middle(tp=4, dcp=4, **VLLM) == ["indexer@3", "choose", "sparse@3", "rescale"]
    assert middle(tp=4, pcp=2, phase="decode", **VLLM) == ["shard@0"]


def test_one_stream():
    """Latents are gathered once tokens are chosen, rotary parts after them."""
    structure = build(deploy(model=SMALL, tp=2, pcp=2, dcp=2, block_size=16, **ASCEND), 100)
    called, ops = names(structure)
    waits = {}
    preds = np.repeat(np.arange(len(called)), np.diff(ops.graph.succ_indptr))
    for before, after in zip(preds.tolist(), ops.graph.succ_indices.tolist(), strict=True):
        waits.setdefault(called[after], set()).add(called[before])
    assert waits["pcp_index"] == {"restore"}
    assert waits["dcp_index_blocks"] == {"restore_index"}
    assert waits["pcp_index_blocks"] == {"restore_index", "dcp_index_blocks"}
    assert waits["select"] == {"indexer@0"}
    assert "pcp_latent_blocks" in waits["dcp_rope_blocks"]
    assert waits["sparse@0"] >= {"pcp_latent_blocks", "pcp_rope_blocks"}


@settings(max_examples=80)
@given(st.data())
def test_audits_are_sound(data):
    semantics = data.draw(st.sampled_from(sorted(LAYOUTS)))
    tp, pcp, dcp = data.draw(st.sampled_from(LAYOUTS[semantics]))
    phase = data.draw(st.sampled_from(["prefill", "decode"]))
    models = [SMALL, MIXED, BESIDE] if semantics == "multiplicative" or pcp > 1 else [SMALL, MIXED]
    packed = semantics == "orthogonal" and 8 // tp % pcp == 0 and data.draw(st.booleans())
    form = {"decode_form": "dcp_a2a"} if packed else {}
    dep = deploy(
        model=data.draw(st.sampled_from(models)), tp=tp, pcp=pcp, dcp=dcp, phase=phase, block_size=16, ep=1,
        cp_semantics=semantics, collective=data.draw(st.sampled_from(ALGORITHMS)),
        interleave=16 if semantics == "multiplicative" else data.draw(st.sampled_from([1, 8])),
        kv_dtype=data.draw(st.sampled_from(["bf16", "fp8"])),
        topology=TOPOLOGIES[data.draw(st.sampled_from(sorted(TOPOLOGIES)))], **form,
    )  # fmt: skip
    cached = data.draw(st.sampled_from([0, 1, 333, 4096])) if phase == "prefill" else 0
    # Full attention gathers segments of whole blocks, which a workspace for a context of few tokens has no room for.
    new, batch = data.draw(st.integers(64 if cached == 1 else 1, 999)), data.draw(st.integers(1, 3))
    assert_sound(dep, new, batch, cached)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("layout", [(*ASCEND.values(), 4, 2, 4), (*VLLM.values(), 8, 1, 4), (*VLLM.values(), 4, 2, 8)])
def test_reduced_equals_full(phase, layout):
    semantics, tp, pcp, dcp = layout
    for topology in TOPOLOGIES.values():
        dep = deploy(
            model=MIXED, tp=tp, pcp=pcp, dcp=dcp, phase=phase, block_size=16, cp_semantics=semantics, topology=topology
        )
        for seq_len in (1024, 1000):
            structure = build(dep, seq_len, 2)
            loads = (np.array([n]) for n in (seq_len, 2, 0))
            costs = cost_rows(dep, structure.keys, structure.network, build_load(dep, *loads), 1)
            assert_reduced_equals_full(structure, costs)


# --- What is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "tokens": ({"pcp": 2, "interleave": 1, **ASCEND}, "sparse attention shares a cache by whole blocks"),
    "half": ({"dcp": 4, **ASCEND}, "dcp = 4 of sparse attention must be tp = 8"),
    "third": ({"dcp": 3, "pcp": 2, **ASCEND}, "dcp = 3 does not divide tp = 8"),
    "spans": ({"dcp": 4, "pcp": 2, **VLLM}, "dcp = 4 with pcp = 2 is none of 1, pcp = 2, tp*pcp = 16"),
    "rings": ({"pcp": 2, "prefill_form": "pass_kv"}, "of sparse attention with pcp or dcp is not deployed"),
    "packed": ({"pcp": 2, "phase": "decode", "decode_form": "dcp_a2a"}, "of sparse attention is not deployed"),
    "fp32": ({"dcp": 8, "phase": "decode", "decode_form": "dcp_a2a_fp32", **VLLM}, "with orthogonal semantics is not"),
    "latents": ({"dcp": 8, "prefill_form": "allgather_kv", **VLLM}, 'with dcp = 8 is not deployed: use "allgather_q"'),
    "queries": ({"pcp": 2, "prefill_form": "allgather_q", **VLLM}, "is deployed for grouped-query attention"),
    "beside": ({"model": BESIDE, "tp": 4, "dcp": 4, **VLLM}, "sparse beside full attention with dcp = 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    changes, message = REFUSED[case]
    with refused(message):
        large(**changes)
