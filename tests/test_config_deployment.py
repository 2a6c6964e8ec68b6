"""Deployments: what is derived, what is refused and with which words, what the digest covers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from g5cp_vec.config.chip import load_chip
from g5cp_vec.config.deployment import Deployment, build_deployment
from g5cp_vec.config.model import Moe, load_model
from g5cp_vec.config.runtime import Runtime
from g5cp_vec.config.topology import Switch, load_topology
from g5cp_vec.errors import InfeasibleError

LLAMA, DEEPSEEK, QWEN = (load_model(name) for name in ("llama-3.1-405b", "deepseek-v3-671b", "qwen3-235b-a22b"))
SMALL = Switch(name="s", n_chips=32, chip_bandwidth_bytes_per_s=1.0, latency_s=0.0)
BASE = {
    "phase": "prefill",
    "model": LLAMA,
    "chip": load_chip("h200-sxm"),
    "topology": load_topology("hgx-8"),
    "n_chips": 64,
    "tp": 8,
    "cp": 4,
}


def deployment(**changes) -> Deployment:
    return build_deployment({**BASE, **changes})


def refusal(**changes) -> str:
    with pytest.raises(InfeasibleError) as caught:
        deployment(**changes)
    return str(caught.value)


def test_defaults_of_a_dense_prefill():
    d = deployment(ep=4)
    assert (d.dp, d.pp, d.ep, d.moe_tp) == (2, 1, None, None)
    assert (d.prefill_form, d.decode_form, d.collective, d.path, d.tp_sp) == ("pass_kv", None, "ring", "g5", False)
    assert d.rank_order == ("tp", "cp", "pp", "dp")
    assert (d.dtype, d.ffn_dtype, d.kv_dtype, d.activation_dtype) == ("bf16", "bf16", "bf16", "bf16")
    assert d.runtime.name == "ideal"


def test_experts_are_laid_over_dp_and_tp():
    d = deployment(model=DEEPSEEK, ep=8, dtype=None)
    assert (d.ep, d.moe_tp) == (8, 2)
    assert (d.dtype, d.ffn_dtype) == ("fp8_block", "fp8_block")
    d = deployment(model=DEEPSEEK, ep=16, dtype="bf16", ffn_dtype="fp4")
    assert (d.moe_tp, d.dtype, d.ffn_dtype) == (1, "bf16", "fp4")


def test_prefill_decode_not_mixed():
    for cp in (1, 4):
        prefill, decode = deployment(cp=cp), deployment(cp=cp, phase="decode")
        assert (prefill.prefill_form, prefill.decode_form) == ("pass_kv", None)
        assert (decode.prefill_form, decode.decode_form) == (None, "pass_q")


def test_dimension_product_refused():
    assert refusal(dp=3) == "dp*tp*pp*cp = 3*8*1*4 = 96, but n_chips = 64"
    assert refusal(n_chips=48) == 'dp = "auto" is not whole: n_chips = 48 over tp*pp*cp = 8*1*4 = 32'
    assert deployment(dp=2).dp == deployment(dp="auto").dp == 2


def test_math_refused():
    assert refusal(path="math") == 'the analytic path has no context parallelism: use path = "g5" or cp = 1'
    assert deployment(path="math", cp=1).path == "math"


def test_tp_sp_refused():
    assert refusal(tp_sp=True) == "tp_sp = true and cp = 4 both split the sequence: use tp_sp = false or cp = 1"
    assert deployment(tp_sp=True, cp=1).tp_sp


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": 3, "cp": 1, "n_chips": 3}, "tp = 3 does not divide 128 attention heads"),
        ({"model": QWEN, "tp": 128, "cp": 1, "n_chips": 128}, "tp = 128 does not divide 64 attention heads"),
        ({"tp": 1, "pp": 128, "cp": 1, "n_chips": 128}, "pp = 128 stages for 126 layers"),
        ({"model": DEEPSEEK, "ep": 3}, "ep = 3 does not divide dp*tp = 2*8 = 16"),
        ({"model": DEEPSEEK, "ep": 512, "n_chips": 2048, "tp": 8, "cp": 4}, "ep = 512 does not divide 256 experts"),
        ({"model": DEEPSEEK, "tp": 4, "cp": 1, "dp": 3, "n_chips": 12}, "moe_tp = dp*tp/ep = 12 does not divide d_e"),
        ({"model": QWEN, "tp": 4, "cp": 1, "n_chips": 24, "ep": 4}, "moe_tp = dp*tp/ep = 6 neither divides nor is a"),
        ({"topology": SMALL}, "n_chips = 64, but topology s has 32 chips"),
    ],
)  # fmt: skip
def test_refusals_name_the_numbers(changes, reason):
    assert refusal(**changes).startswith(reason)


def test_widths_must_split_evenly():
    odd = LLAMA.model_copy(update={"d_ff": 53250})
    assert refusal(model=odd) == "tp = 8 does not divide d_ff = 53250; tp = 2 would do"
    six = LLAMA.attention.model_copy(update={"n_kv_heads": 6, "n_heads": 48})
    assert refusal(model=LLAMA.model_copy(update={"attention": six})) == (
        "tp = 8 neither divides nor is a multiple of 6 key/value heads; tp = 2 would do"
    )
    shared = QWEN.model_copy(update={"moe": Moe(n_experts=128, top_k=8, d_expert=1540, n_shared=1)})
    assert refusal(model=shared, ep=16) == "tp = 8 does not divide the shared experts' width 1540; tp = 4 would do"
    # No layer of this model is dense, so its d_ff is free.
    assert deployment(model=QWEN.model_copy(update={"d_ff": 12289}), ep=16).ep == 16
    # More shards than key/value heads replicate them.
    assert deployment(model=QWEN, tp=8, ep=4).tp == 8


def test_runtime_default_is_the_topologys_then_the_chips():
    topology = BASE["topology"].model_copy(update={"runtime": "ideal"})
    assert deployment(topology=topology).runtime.name == "ideal"
    own = Runtime(name="own", prefill_op_overhead_s=1e-6, decode_op_overhead_s=0.0)
    assert deployment(topology=topology, runtime=own).runtime == own


def test_digest_is_stable_and_covers_everything():
    base = deployment(model=DEEPSEEK, ep=8)
    assert 0 <= base.digest < 2**64
    assert base.digest == deployment(model=load_model("deepseek-v3-671b"), ep=8, dp=2).digest
    assert base == deployment(model=load_model("deepseek-v3-671b"), ep=8, dp=2)
    changes = [
        {"chip": BASE["chip"].model_copy(update={"hbm_bandwidth_bytes_per_s": 1e12})},
        {"kv_dtype": "fp8"},
        {"phase": "decode"},
        {"ep": 16},
        {"rank_order": ("cp", "tp", "pp", "dp")},
        {"collective": "direct"},
        {"topology": load_topology("hgx-8-oversub2")},
        {"runtime": Runtime(name="ideal", prefill_op_overhead_s=1e-6, decode_op_overhead_s=0.0)},
    ]
    digests = {deployment(**{"model": DEEPSEEK, "ep": 8, **change}).digest for change in changes}
    assert len(digests | {base.digest}) == len(changes) + 1


def test_digest_does_not_depend_on_the_process():
    code = "import test_config_deployment as t; print(t.deployment(model=t.DEEPSEEK, ep=8).digest)"
    # A fresh interpreter hashes text with another seed.
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert int(other.stdout) == deployment(model=DEEPSEEK, ep=8).digest


def test_callers_mistakes_are_type_errors():
    with pytest.raises(TypeError, match="unknown keys: cq"):
        deployment(cq=1)
    with pytest.raises(TypeError, match="absent keys: cp"):
        build_deployment({key: value for key, value in BASE.items() if key != "cp"})
    assert deployment(seq_len=1, batch=2, cached_tokens=0) == deployment()
    with pytest.raises(dataclasses.FrozenInstanceError):
        deployment().tp = 2
