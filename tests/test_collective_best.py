"""`collective = "best"`: every point takes the faster algorithm of each kind of group, whole and audited."""

from __future__ import annotations

import dataclasses

import pytest
from test_acceptance_tools import sweep_rows

from g5cp_vec import run, sweep
from g5cp_vec.config.collectives import COLLECTIVES
from g5cp_vec.config.grid import load_grid
from g5cp_vec.errors import InfeasibleError
from g5cp_vec.runner.breakdown import break_down
from g5cp_vec.runner.plan import points

FIXED = {
    "model": "llama-3.1-8b", "chip": "h100-sxm", "topology": "hgx-8", "phase": "decode", "cp": 1, "tp": 16,
    "n_chips": 32, "pcp": 2, "seq_len": 8192,
}  # fmt: skip


def runs(fidelity, axes, **fixed):
    """Rows by algorithm; the two algorithms of each kind of group as every row's own points."""
    fixed = {key: value for key, value in (FIXED | fixed).items() if key not in axes}
    names = ("ring", "direct", "best")
    return {name: sweep_rows(fixed | {"collective": name}, fidelity, **axes) for name in names}


@pytest.mark.parametrize("fidelity", ["exact", "full"])
def test_no_row_is_slower_than_with_one_algorithm_for_all(fidelity):
    axes = {"batch": [1, 64], "topology": ["hgx-8-oversub2", "flat-450"], "phase": ["decode", "prefill"]}
    rows, chosen = runs(fidelity, axes), set()
    for ring, direct, best in zip(rows["ring"], rows["direct"], rows["best"], strict=True):
        assert ring["chosen_collective"] is direct["chosen_collective"] is None
        word = best["chosen_collective"]
        chosen.add(word)
        alike = {"tp=ring,pcp=ring": ring, "tp=direct,pcp=direct": direct}
        faster = min(ring, direct, key=lambda row: row["step_s"])
        if word not in alike:
            assert best["step_s"] < faster["step_s"]
            continue
        assert best["step_s"] == faster["step_s"]
        apart = {key for key in best if best[key] != alike[word][key]}
        assert apart == {"point_id", "collective", "chosen_collective"}
    assert chosen == {"tp=ring,pcp=ring", "tp=direct,pcp=direct"}


def test_mixtures_win_where_groups_differ():
    """Long prompts of latent attention: tp inside a node direct, tokens of experts over two nodes by rings."""
    axes = {"phase": ["prefill", "decode"], "seq_len": [4096, 131072], "batch": [1, 16]}
    fixed = {"model": "deepseek-v3-671b", "ep": 16, "tp": 8, "n_chips": 16, "dcp": 8}
    rows, mixed = runs("exact", axes, **fixed), 0
    for ring, direct, best in zip(rows["ring"], rows["direct"], rows["best"], strict=True):
        algorithms = {part.split("=")[1] for part in best["chosen_collective"].split(",")}
        faster = min(ring["step_s"], direct["step_s"])
        mixed += len(algorithms) > 1
        assert best["step_s"] < faster if len(algorithms) > 1 else best["step_s"] == faster
        alone = run({"name": "p", "fixed": FIXED | fixed | {key: best[key] for key in axes} | {"collective": "best"}})
        assert (alone.step_s, alone.chosen_collective) == (best["step_s"], best["chosen_collective"])
    assert 0 < mixed < len(rows["best"])


@pytest.mark.parametrize(
    ("fixed", "groups"),
    [
        ({"tp": 8, "pcp": 1, "n_chips": 8}, ["tp"]),
        ({"tp": 1, "pcp": 1, "n_chips": 1}, None),
        # Rows go to experts in one exchange, whatever the algorithm.
        ({"model": "qwen3-235b-a22b", "ep": 16, "tp": 8, "n_chips": 16, "moe_dispatch": "all_to_all"}, ["tp", "pcp"]),
        ({"model": "qwen3-235b-a22b", "ep": 16, "tp": 8, "n_chips": 16, "dcp": 2}, ["tp", "ep", "pcp", "dcp"]),
        # A prefill of all tokens has no context that dcp would gather.
        ({"model": "deepseek-v3-671b", "ep": 16, "tp": 8, "n_chips": 16, "dcp": 8, "phase": "prefill"},
         ["tp", "ep", "pcp"]),
        ({"model": "deepseek-v3-671b", "ep": 16, "tp": 8, "n_chips": 16, "dcp": 8, "phase": "prefill",
          "chunk_tokens": 4096}, ["tp", "ep", "pcp", "dcp"]),
        ({"cp": 2, "pcp": 1, "phase": "prefill", "prefill_form": "allgather_kv"}, ["tp", "cp"]),
        ({"cp": 2, "pcp": 1, "phase": "prefill"}, ["tp"]),  # a ring has no choice
    ],
)  # fmt: skip
def test_groups_that_send_have_a_choice(fixed, groups):
    result = run({"name": "p", "fixed": FIXED | {"collective": "best"} | fixed})
    word = result.chosen_collective
    assert (word and [part.split("=")[0] for part in word.split(",")]) == groups
    assert result.breakdown().step_s == pytest.approx(result.step_s, rel=1e-12)
    assert result.lost_bytes == result.lost_ops == 0


def test_the_choice_is_the_best_of_all_where_two_kinds_of_groups_differ():
    """Every combination, simulated by itself."""
    fixed = FIXED | {"topology": "hgx-8-oversub2"}
    for phase, batch in (("prefill", 1), ("decode", 64)):
        point = {"name": "p", "fixed": fixed | {"phase": phase, "batch": batch, "collective": "best"}}
        expansion = load_grid(point, point=True).expand()
        (dep,), loads = expansion.deployments, points(expansion, slice(None))
        words = [f"tp={tp},pcp={pcp}" for tp in COLLECTIVES for pcp in COLLECTIVES]
        seconds = {word: break_down(dataclasses.replace(dep, collective=word), loads).step_s for word in words}
        best = run(point)
        assert best.step_s == pytest.approx(seconds[best.chosen_collective], rel=1e-12)
        assert best.step_s <= min(seconds.values()) * (1 + 1e-12)


def test_it_is_audited():
    frame = sweep({"name": "t", "fixed": FIXED | {"collective": "best"}, "axes": {"dcp": [1]}}, audit="all")
    assert frame["lost_bytes"].to_list() == [0]
    result = run({"name": "p", "fixed": FIXED | {"collective": "best"}})
    assert result.lost_ops == 0
    assert result.breakdown().step_s == result.step_s


def test_the_closed_form_cannot_choose():
    with pytest.raises(InfeasibleError, match='collective = "best" is chosen by simulation'):
        run({"name": "p", "fixed": FIXED | {"pcp": 1, "n_chips": 16, "path": "math", "collective": "best"}})
