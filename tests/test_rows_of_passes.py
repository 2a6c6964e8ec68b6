"""What a row of a sweep says of itself does not depend on the rows beside it, whatever passes these take."""

from __future__ import annotations

import pytest

from g5cp_vec import run, sweep

FIXED = {
    "model": "deepseek-v3-671b", "chip": "h200-sxm", "topology": "hgx-8", "phase": "prefill", "cp": 1, "tp": 8,
    "pcp": 2, "dcp": 8, "n_chips": 16, "ep": 16, "interleave": 128,
}  # fmt: skip
SAID = ("chosen_collective", "unmeasured_collectives", "calibrated", "uncalibrated_parts", "extrapolated", "n_passes")


@pytest.mark.parametrize("changes", [{"collective": "best"}, {"runtime": "vllm"}, {"model": "deepseek-r1"}])
def test_a_prompt_in_one_pass_beside_prompts_in_several(changes):
    """Only a pass over cached context gathers over dcp, so only the others have to do with what that needs."""
    axes = {"chunk_tokens": [0, 4096], "seq_len": [8192, 12288]}
    frame = sweep({"name": "t", "fixed": FIXED | changes, "axes": axes}, audit="none")
    assert frame["n_passes"].to_list() == [1, 1, 2, 3]
    for row in frame.to_dicts():
        alone = run({"name": "p", "fixed": FIXED | changes | {key: row[key] for key in axes}})
        assert {key: row.get(key) for key in SAID} == {key: getattr(alone, key, None) for key in SAID}
        assert row["step_s"] == pytest.approx(alone.step_s, rel=1e-12)
    if "collective" in changes:
        assert ["dcp" in word for word in frame["chosen_collective"]] == [False, False, True, True]
