"""Users of a server: against a twin that makes one token at a time, and cases by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g5cp_vec.analysis.serving import Client, Engine, serve


def engine(prefill_s=0.001, base_s=0.01, context_s=1e-6, budget=8192, ahead=0, wait=0, frontend=(0.0, 0.0), poll=1):
    return Engine(
        lambda n: prefill_s * n,
        lambda batch, context: base_s + batch * context_s * context,
        budget,
        ahead,
        wait,
        lambda n: frontend[0] + frontend[1] * n,
        poll,
    )


def twin(client, e, seed):
    """Play one step after another, as an engine does: users, a front end, a queue, counters of steps."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(int(client.input_tokens * client.shortest), client.input_tokens + 1, client.n_requests)
    answers = rng.integers(int(client.output_tokens * client.shortest), client.output_tokens + 1, client.n_requests)
    todo = [{"prompt": int(p), "left": int(a), "answer": int(a)} for p, a in zip(prompts, answers, strict=True)]
    coming, queue, active, done, now, hold, steps = [], [], [], [], 0.0, 0, 0

    def send():
        if todo:
            request = {**todo.pop(), "sent": now}
            free = max([now, *(r["ready"] for r in coming)])
            coming.append({**request, "ready": free + e.frontend_s(request["prompt"])})

    for _ in range(client.concurrency):
        send()
    while coming or queue or active:
        if not queue and not active:
            now, steps = max(now, coming[0]["ready"]), 0
        if steps % e.poll_steps == 0:
            ready = [r for r in coming if r["ready"] <= now]
            if ready and not queue:
                hold = e.steps_ahead + e.wait_steps
            queue += ready
            coming = [r for r in coming if r["ready"] > now]
        if queue and (hold == 0 or not active):
            batch = [queue.pop(0)]
            while queue and sum(r["prompt"] for r in batch) + queue[0]["prompt"] <= e.step_tokens:
                batch.append(queue.pop(0))
            now += e.prefill_s(sum(r["prompt"] for r in batch) + len(active))
            for r in batch:
                r["first"] = now
            active += batch
            hold = steps = 0
        else:
            mean = sum(r["prompt"] + r["answer"] - r["left"] for r in active) / len(active)
            now += e.decode_s(len(active), mean)
            steps += 1
            if queue:
                hold -= 1
        for r in active:
            r["left"] -= 1
        ended = [r for r in active if r["left"] == 0]
        active = [r for r in active if r["left"]]
        for r in ended:
            done.append((r["first"] - r["sent"], (now - r["first"]) / max(r["answer"] - 1, 1)))
            send()
    return np.mean(done, axis=0)


@settings(max_examples=30, deadline=None)
@given(
    users=st.integers(1, 5),
    prompt=st.integers(1, 60),
    answer=st.integers(1, 40),
    requests=st.integers(1, 25),
    shortest=st.sampled_from([0.1, 0.8, 1.0]),
    budget=st.integers(1, 200),
    ahead=st.integers(0, 2),
    wait=st.integers(0, 20),
    # Times that no whole number of steps equals, so that rounding decides nothing.
    frontend=st.sampled_from([(0.0, 0.0), (0.0031415, 0.0), (0.0271828, 0.00070711), (0.0, 0.0031415)]),
    poll=st.integers(1, 12),
)
def test_equals_the_twin(users, prompt, answer, requests, shortest, budget, ahead, wait, frontend, poll):
    prompt, answer = max(prompt, 10), max(answer, 10)
    client = Client(users, prompt, answer, requests, shortest)
    e = engine(budget=budget, ahead=ahead, wait=wait, frontend=frontend, poll=poll)
    expected = np.mean([twin(client, e, seed) for seed in range(16)], axis=0)
    assert serve(client, e) == pytest.approx(tuple(expected), rel=1e-9)


def test_one_user_waits_for_nobody():
    served = serve(Client(1, 100, 11, 7), engine())
    assert served.ttft_s == pytest.approx(0.1)
    assert served.tpot_s == pytest.approx(0.01 + 1e-6 * (101 + 110) / 2)


def test_two_users_by_hand():
    """Same lengths: both start together, end together, for ever; a prefill takes both prompts, or one after another."""
    together = serve(Client(2, 100, 10, 20), engine(context_s=0.0))
    assert together == pytest.approx((0.2, 0.01))
    # One prompt a step: the second waits for the first, whose first token's successor comes with the second prefill.
    apart = serve(Client(2, 100, 10, 2), engine(context_s=0.0, budget=100))
    first, second = 0.1, 0.1 + 0.101
    assert apart.ttft_s == pytest.approx((first + second) / 2)
    assert apart.tpot_s == pytest.approx(((0.101 + 8 * 0.01) / 9 + 0.01) / 2)


def test_steps_ahead_and_held_steps_add_steps():
    client = Client(4, 100, 50, 40, 0.5)
    times = [serve(client, engine(ahead=ahead, wait=wait)).ttft_s for ahead, wait in ((0, 0), (1, 0), (1, 20))]
    assert times[0] < times[1] < times[2]
    assert times[1] - times[0] < 0.03


def test_a_front_end_works_on_one_request_after_another():
    """Two users by hand: 0.05 s each; the first prompt runs while the second is still text."""
    e = engine(context_s=0.0, frontend=(0.02, 0.0003))
    assert serve(Client(1, 100, 10, 5), e).ttft_s == pytest.approx(0.05 + 0.1)
    served = serve(Client(2, 100, 10, 2), e)
    first, second = 0.05 + 0.1, 0.15 + 0.101
    assert served.ttft_s == pytest.approx((first + second) / 2)
    # A prompt that comes during a decode step waits for its end: at 0.31, 5.5 steps after the first token at 0.255.
    served = serve(Client(2, 100, 30, 2), engine(context_s=0.0, frontend=(0.155, 0.0)))
    assert served.ttft_s == pytest.approx((0.255 + 0.255 + 6 * 0.01 + 0.101) / 2)


def test_an_engine_that_seldom_looks_answers_later_by_half_the_interval():
    """Answers end at any of the steps between two looks; short prefills, so that it hardly matters who shares one."""
    client = Client(4, 100, 200, 400, 0.5)
    engines = (engine(1e-6, context_s=0.0, frontend=(0.001, 0.0), poll=poll) for poll in (1, 11))
    soon, late = (serve(client, e).ttft_s for e in engines)
    assert late - soon == pytest.approx((11 - 1) / 2 * 0.01, rel=0.1)
    alone = Client(1, 100, 50, 10)
    assert serve(alone, engine(poll=11)) == serve(alone, engine())
