"""Prompts that wait: for more of them, for those of other engines, for their turn to be seen."""

from typing import Any

import numpy as np
import pytest
from scheduler_steps import SchedulerRun

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import plan_requests

_WAIT = {"batch_wait_iters": 3, "batch_wait_tokens_ratio": 0.5}


def _decoding(profile: str = "trtllm-1.0", **rules: Any) -> SchedulerRun:
    """Return an engine of 100 tokens a step on which a request decodes."""
    run = SchedulerRun(profile, [(20, 50)], 100, max_num_batched_tokens=100, **rules)
    run.step()
    return run


def _wait_of(run: SchedulerRun, request: int) -> int:
    """Return how many steps go by before a prompt is computed."""
    for count in range(20):
        if request in run.step().prompts:
            return count
    raise AssertionError(run.steps)


@pytest.mark.parametrize(("prompt", "expected"), [(10, 3), (48, 3), (49, 0), (80, 0)])
def test_a_small_prompt_waits_for_company(prompt: int, expected: int) -> None:
    """For three steps, or until the batch, with the one that decodes, has 50 of 100 tokens."""
    run = _decoding(**_WAIT)
    run.arrive(prompt, 5)
    assert expected == _wait_of(run, 1)


def test_all_that_came_meanwhile_are_computed_together() -> None:
    run = _decoding(**_WAIT)
    run.arrive(10, 5)
    assert ({}, {0}) == (run.step().prompts, run.steps[-1].decodes)
    run.arrive(45, 5)
    assert {1: 10, 2: 45} == run.step().prompts


def test_nobody_waits_where_nobody_decodes() -> None:
    run = SchedulerRun("trtllm-1.0", [(10, 5)], 100, max_num_batched_tokens=100, **_WAIT)
    assert {0: 10} == run.step().prompts


def test_what_finds_no_room_is_not_waited_for() -> None:
    """Blocks for the answer are all taken: there is no prompt to count waits of."""
    run = SchedulerRun("trtllm-1.0", [(20, 50)], 3, max_num_batched_tokens=100, **_WAIT)
    run.step()
    run.arrive(10, 60)
    for _ in range(20):
        assert not run.step().prompts
    assert int(run.state.arrays["units"]["num_waited"][0]) == 0


@pytest.mark.parametrize("profile", ["vllm-0.31", "sglang-0.5", "trtllm-1.0"])
def test_every_request_is_served_under_any_rule(profile: str) -> None:
    """Waits change when prompts are computed, and nothing of what is computed."""
    requests = [(30, 7), (5, 20), (64, 3), (12, 12)]
    rules = [_WAIT, {"prefill_interval": 4}, {"receive_interval": 5}]
    for each in rules:
        steps = SchedulerRun(profile, requests, 400, max_num_batched_tokens=64, **each).run()
        computed = [sum(step.prompts.get(r, 0) for step in steps) for r in range(4)]
        tokens = [sum(r in step.decodes for step in steps) for r in range(4)]
        assert [30, 5, 64, 12] == computed
        assert [6, 19, 2, 11] == tokens


def test_prompts_have_every_fourth_step() -> None:
    """The first began in step 0; steps are counted from there."""
    run = _decoding("vllm-0.31", prefill_interval=4)
    run.arrive(10, 5)
    assert 3 == _wait_of(run, 1)


def test_where_prompts_were_left_over_they_are_not_held_back() -> None:
    """The third does not fit into the budget of step 4, so step 5 goes on with it."""
    run = _decoding("vllm-0.31", prefill_interval=4)
    for prompt in (60, 60, 60):
        run.arrive(prompt, 5)
    assert 3 == _wait_of(run, 1)
    assert 3 in run.step().prompts


def test_new_requests_are_seen_every_fifth_step() -> None:
    """The engine looked before step 0; nobody who waits is in a batch before step 5."""
    run = _decoding("sglang-0.5", receive_interval=5)
    run.step()
    run.arrive(10, 5)
    assert 4 == _wait_of(run, 1)


@pytest.mark.parametrize("arrival_step", range(2, 22))
def test_it_looks_once_before_each_fifth_step_however_steps_are_run(arrival_step: int) -> None:
    """Of an engine alone, steps up to an arrival are run at once: that does not move its looks."""
    profile = EngineProfile(
        name="sparse", engine="sparse", scheduler="trtllm", max_num_seqs=4, receive_interval=5
    )
    setup = DeploymentSetup(profile=profile, num_kv_blocks=99, num_engines=1)
    ones = np.ones(2, dtype=np.int64)
    arrivals = np.array([0, int((arrival_step - 0.5) * 1e6)])
    plan = plan_requests(arrivals, 10 * ones, 40 * ones)
    record = run_deployment(plan, setup, flat_tables(1000.0, 0.0), lambda _: None)
    looks = [1, 6, 11, 16, 21, 26]
    expected = min(step for step in looks if step >= arrival_step)
    assert [0, expected] == _prompt_steps(record)


def test_after_prompts_and_when_idle_it_looks_at_once() -> None:
    run = SchedulerRun("sglang-0.5", [(20, 2)], 100, receive_interval=50)
    run.step()
    run.arrive(10, 5)
    assert 0 == _wait_of(run, 1)
    while run.running:
        run.step()
    run.arrive(10, 5)
    assert 0 == _wait_of(run, 2)


def _lock_step(arrivals_us: list[int], **rules: Any) -> ServingRecord:
    """Return two engines that share experts, whose steps take a millisecond, and take turns."""
    profile = EngineProfile(
        name="two", engine="two", scheduler="trtllm", admission="answer", max_num_seqs=4, **rules
    )
    setup = DeploymentSetup(profile=profile, num_kv_blocks=99, num_engines=2, is_lock_step=True)
    ones = np.ones(len(arrivals_us), dtype=np.int64)
    plan = plan_requests(1000 * np.array(arrivals_us), 10 * ones, 40 * ones)
    return run_deployment(plan, setup, flat_tables(1000.0, 0.0), lambda _: None)


def _prompt_steps(record: ServingRecord) -> list[int]:
    """Return the steps of the first engine, then of the second, that compute prompts."""
    return [step for steps in record.steps for step in np.flatnonzero(steps.num_prefills).tolist()]


def test_a_prompt_waits_until_all_engines_have_one() -> None:
    """The third comes while both decode, the fourth, for the other engine, four steps later."""
    arrivals_us = [0, 0, 2500, 6500]
    assert [0, 3, 0, 7] == _prompt_steps(_lock_step(arrivals_us))
    assert [0, 7, 0, 7] == _prompt_steps(_lock_step(arrivals_us, balance_timeout_iters=50))


def test_it_waits_no_longer_than_the_timeout() -> None:
    """Steps without prompts count from the first: in the tenth whoever waits is computed."""
    found = _prompt_steps(_lock_step([0, 0, 2500], balance_timeout_iters=10))
    assert [0, 10, 0] == found


def test_when_all_have_one_they_gather_more() -> None:
    arrivals_us = [0, 0, 2500, 2500]
    rules = {"balance_timeout_iters": 50, "balance_wait_iters": 5}
    assert [0, 3 + 5, 0, 3 + 5] == _prompt_steps(_lock_step(arrivals_us, **rules))


def test_an_engine_that_decodes_nothing_waits_for_nobody() -> None:
    assert [0, 3] == _prompt_steps(_lock_step([0, 2500], balance_timeout_iters=50))
