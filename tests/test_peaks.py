"""Nothing is faster than the hardware: predictions of every kind on every calibrated chip, and measured rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from g5cp_vec.cli import main
from g5cp_vec.config.calibration import Kernels
from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.dtypes import DTYPE_BITS
from g5cp_vec.cost.calibration import price_part, surface_seconds
from g5cp_vec.cost.parts import AttentionShape, GemmShape, Part
from g5cp_vec.cost.roofline import part_seconds

CHIPS = {name: load_chip(name) for name in ("h100-sxm", "h200-sxm", "b200-sxm")}
LIBRARIES = ("", "vllm", "trtllm", "sglang")
SIZES = st.integers(0, 60).map(lambda e: round(2 ** (e / 3)))  # 1 to a million, evenly in the logarithm
SMALL = st.integers(0, 24).map(lambda e: round(2 ** (e / 3)))


def seconds(chip, part, library="", hidden=4096):
    dep = SimpleNamespace(
        chip=chip, model=SimpleNamespace(hidden=hidden), runtime=SimpleNamespace(kernels=Kernels(library))
    )
    return float(part_seconds(dep, part))


def size_bytes(elements, dtype):
    return -(-elements * DTYPE_BITS[dtype] // 8)


@st.composite
def products(draw):
    m, n_weights = draw(SIZES), draw(SMALL)
    k, n = 16 * draw(SMALL), 16 * draw(SMALL)
    dtype = draw(st.sampled_from(["bf16", "fp8", "fp4", "int8"]))
    is_expert = draw(st.booleans())
    shape = GemmShape(m, k, n, n_weights, n if is_expert else 0)
    moved = size_bytes(m * (k + n), "bf16") + n_weights * size_bytes(k * n, dtype)
    return Part("experts" if is_expert else "qkv", "gemm", 2 * m * k * n, moved, dtype, shape)


@st.composite
def attentions(draw, phase=None):
    phase = phase or draw(st.sampled_from(["prefill", "decode"]))
    latent = draw(st.booleans())
    batch, kv_heads = draw(st.integers(1, 64)), draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 8))
    new = draw(SIZES) if phase == "prefill" else 1
    cached = draw(SIZES)
    if phase == "decode":
        pairs, kv_tokens = float(cached), cached
    else:
        pairs, kv_tokens = new * cached + new * new / 2, new + cached
    d_qk, d_v = (576, 512) if latent else draw(st.sampled_from([(128, 128), (64, 64), (192, 128), (256, 256)]))
    dtype = draw(st.sampled_from(["bf16", "fp8"]))
    kv_dtype = draw(st.sampled_from(["bf16", "fp8"]))
    shape = AttentionShape(phase, batch, new, kv_tokens, pairs, heads, kv_heads, d_qk, d_v, latent, kv_dtype,
                           chosen=draw(st.booleans()))  # fmt: skip
    keys = size_bytes(batch * kv_tokens * (d_qk if latent else kv_heads * (d_qk + d_v)), kv_dtype)
    moved = keys + size_bytes(batch * new * heads * (d_qk + d_v), "bf16")
    return Part("attention", "attention", int(2 * batch * heads * (d_qk + d_v) * pairs), moved, dtype, shape)


def elementwise():
    return SIZES.map(lambda n: Part("qkv", "memory", 0, n, "bf16"))


@settings(max_examples=600, deadline=None)
@given(st.sampled_from(sorted(CHIPS)), st.sampled_from(LIBRARIES), products() | attentions() | elementwise(), SMALL)
def test_no_prediction_beats_the_roofline(name, library, part, width):
    """Arithmetic at the peak of the fastest type involved, every byte once at the full bandwidth."""
    chip = CHIPS[name]
    types = {part.dtype, part.shape.kv_dtype} if isinstance(part.shape, AttentionShape) else {part.dtype}
    peak = max(chip.peak(dtype) for dtype in types)
    least_s = max(part.flops / peak, part.bytes / chip.hbm_bandwidth_bytes_per_s)
    predicted_s = seconds(chip, part, library, 64 * width)
    assert np.isfinite(predicted_s)
    assert predicted_s >= least_s * (1 - 1e-12)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CHIPS)), st.data())
def test_no_surface_beats_its_peak(name, data):
    """Whole modules and collectives as well, which simulations do not take as parts."""
    chip = CHIPS[name]
    surface = data.draw(st.sampled_from(chip.calibration.surface))
    place = tuple(float(data.draw(SIZES)) for _ in surface.axes)
    c, predicted_s = surface.numbers, float(surface_seconds(chip, surface, place))
    if surface.kind == "collective":
        message, group = place[0], max(place[1], 2.0)
        predicted_s = float(surface_seconds(chip, surface, (message, group)))
        # Of each rank's bytes all but its own part leave by its port, once at least.
        least_s = message * (group - 1) / group / (c["link_gigabytes_per_second"] * 1e9)
    elif surface.kind == "gemm":
        m, n, k = place
        moved = (n * k + m * k) * c["element_bits"] / 8 + 2 * m * n
        least_s = max(2 * m * n * k / chip.peak(surface.arithmetic_dtype), moved / chip.hbm_bandwidth_bytes_per_s)
    elif surface.kind in ("attention_prefill", "mla_prefill"):
        length, heads = place
        least_s = heads * length**2 * (c["d_qk"] + c["d_v"]) / chip.peak(surface.arithmetic_dtype)
    elif surface.kind in ("attention_decode", "mla_decode"):
        tokens = place[0] * place[1] * (c["d_qk"] + (c["d_v"] if surface.kind == "attention_decode" else 0))
        least_s = tokens * c["element_bits"] / 8 / chip.hbm_bandwidth_bytes_per_s
    elif surface.kind == "moe":
        rows, experts, width = place
        least_s = 6 * rows * experts * c["hidden"] * width / chip.peak(surface.arithmetic_dtype)
    else:
        least_s = 0.0
    assert predicted_s >= least_s * (1 - 1e-12)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(CHIPS)), st.sampled_from(LIBRARIES), st.integers(1, 64), SIZES, SIZES,
    st.integers(1, 8), st.integers(1, 8), st.sampled_from([64, 128]),
)  # fmt: skip
def test_new_tokens_over_a_cache_take_as_long_as_a_decode_step(name, library, batch, new, cached, kv_heads, group, d):
    """One new token takes what a decode step over the same keys does at least, and more of them no less."""
    chip, heads = CHIPS[name], kv_heads * group

    def part(phase, new, kv_tokens, pairs):
        shape = AttentionShape(phase, batch, new, kv_tokens, pairs, heads, kv_heads, d, d, False, "bf16")
        moved = 2 * batch * (kv_tokens * kv_heads + new * heads) * 2 * d
        return Part("attention", "attention", int(4 * batch * heads * d * pairs), moved, "bf16", shape)

    decode_s = float(price_part(chip, 4096, part("decode", 1, cached + 1, float(cached + 1)), Kernels(library)).seconds)
    one, more = (part("prefill", n, cached + n, n * cached + n * n / 2) for n in (1, new))
    assert seconds(chip, one, library) >= decode_s * (1 - 1e-12)
    assert seconds(chip, more, library) >= decode_s * (1 - 1e-12)


def test_a_square_is_priced_as_measured():
    """What the tables have, causal squares, is theirs: the decode step beside counts over a cache only."""
    chip = CHIPS["h100-sxm"]
    shape = AttentionShape("prefill", 1, 4096, 4096, 4096**2 / 2, 8, 1, 128, 128, False, "bf16")
    part = Part("attention", "attention", 2 * 8 * 256 * 4096**2 // 2, 1, "bf16", shape)
    surface = chip.calibration.defaults["attention_prefill", "bf16"]
    assert seconds(chip, part) == pytest.approx(float(surface_seconds(chip, surface, (4096, 8))), rel=1e-12)


# --- Measured rows ----------------------------------------------------------------------------------------------------

HEAD = "system,library,m,n,k,gemm_dtype,latency_us\n"
# 2 * 4096^3 FLOPs take 139 us at 989 TFLOP/s.
GOOD = "".join(f"h100_sxm,mine,{m},4096,4096,bfloat16,{20 + 0.06 * m}\n" for m in (64, 128, 256, 512, 1024, 4096))
FAST = "h100_sxm,mine,4096,4096,4096,bfloat16,70\n"


def calibrate(tmp_path, text, *options):
    table = tmp_path / "gemm.csv"
    table.write_text(HEAD + text)
    return CliRunner().invoke(main, ["calibrate", str(table), "--chip", "h100-sxm", *options])


def test_rows_that_beat_the_peak_are_named_and_left_out(tmp_path):
    out = [tmp_path / f"{i}.toml" for i in range(2)]
    good = calibrate(tmp_path, GOOD, "-o", str(out[0]))
    assert (good.exit_code, good.stderr) == (0, "")
    found = calibrate(tmp_path, GOOD + FAST, "-o", str(out[1]))
    assert found.exit_code == 0
    # 2 * 4096^3 / 989e12 = 138.97 us, 1.985 of 70 us, shown rounded up.
    assert found.stderr == (
        "1 of 7 rows beat what the hardware can do: gemm.csv line 8 (gemm on h100_sxm, 1.986 times the peak); they are "
        "left out, check units and element types\n"
    )
    chips = [load_chip(str(path)) for path in out]
    assert chips[0].calibration.fingerprint == chips[1].calibration.fingerprint
    evaluated = calibrate(tmp_path, GOOD + FAST, "--evaluate")
    assert evaluated.exit_code == 0
    assert evaluated.stderr.startswith("1 of 7 rows beat what the hardware can do: gemm.csv line 8 ")
    assert evaluated.stderr.endswith("; no prediction does\n")


def test_many_are_counted_and_nothing_left_is_refused(tmp_path):
    found = calibrate(tmp_path, 9 * FAST, "-o", str(tmp_path / "x.toml"))
    assert found.exit_code == 2
    (line,) = found.stderr.strip().splitlines()
    assert (
        "9 of 9 rows beat what the hardware can do: gemm.csv line 2 (gemm on h100_sxm, 1.986 times the peak), " in line
    )
    assert line.endswith("and 4 more; no row of 'h100_sxm' is left: check units, element types and the chip")
    assert not (tmp_path / "x.toml").exists()
