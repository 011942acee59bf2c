"""LightLLM: a look at the queue every few steps, against the most tokens ever held at once."""

import pytest
from scheduler_steps import SchedulerRun


@pytest.mark.parametrize("max_decode_run", [1, 3, 10])
def test_waiting_requests_are_looked_at_every_few_steps(max_decode_run: int) -> None:
    """One that arrives after the first prompt waits for so many steps of decoding."""
    run = SchedulerRun("lightllm", [(10, 50)], 1000, max_decode_run=max_decode_run)
    run.step()
    run.arrive(10, 5)
    steps = run.run()
    expected = [1 + max_decode_run]
    assert expected == [number for number, step in enumerate(steps) if 1 in step.prompts]


def test_an_idle_engine_looks_at_once() -> None:
    """Nothing runs: no step passes before the prompt."""
    assert {0: 10} == SchedulerRun("lightllm", [(10, 5)], 1000).step().prompts


def test_the_peak_decides_not_the_sum() -> None:
    """The short one has left when the long one is at its longest: 90 blocks are enough."""
    run = SchedulerRun("lightllm", [(20, 50), (20, 5)], 90)
    assert {0: 20, 1: 20} == run.step().prompts


def test_one_alone_may_fill_the_cache() -> None:
    """It ends with 69 tokens; with another that would be too many."""
    run = SchedulerRun("lightllm", [(20, 50)], 69)
    assert {0: 20} == run.step().prompts
    assert 50 == 1 + sum(len(step.decodes) for step in run.run())


def test_two_that_grow_together_need_room_for_both() -> None:
    """Both end with 69 tokens in the same step, and 130 are there."""
    run = SchedulerRun("lightllm", [(20, 50), (20, 50)], 130)
    assert {0: 20} == run.step().prompts


def test_what_was_admitted_stays() -> None:
    """The peak is exact where answers have the length that is known: nobody is preempted."""
    requests = [(5 + 7 * i % 40, 1 + 11 * i % 60) for i in range(30)]
    steps = SchedulerRun("lightllm", requests, 250).run()
    assert not [step for step in steps if step.preempted]
