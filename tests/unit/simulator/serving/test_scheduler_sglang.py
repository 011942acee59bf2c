"""SGLang: prompts first, a share of the answers reserved, retraction of the shortest answers."""

import pytest
from scheduler_steps import SchedulerRun


def test_prompts_come_before_decodes() -> None:
    """A prompt that waits is computed while those that run pause."""
    run = SchedulerRun("sglang-0.5", [(20, 5)], 1000)
    run.step()
    run.arrive(30, 5)
    step = run.step()
    assert ({1: 30}, frozenset()) == (step.prompts, step.decodes)


def test_a_prompt_is_cut_at_the_chunk_and_goes_on() -> None:
    """The second prompt fills the first step, its rest comes before a decode."""
    run = SchedulerRun("sglang-0.5", [(60, 5), (100, 5)], 1000, max_num_batched_tokens=100)
    steps = [run.step() for _ in range(3)]
    assert [{0: 60, 1: 40}, {1: 60}, {}] == [step.prompts for step in steps]
    assert {0, 1} == steps[2].decodes


def test_a_new_request_needs_room_for_its_whole_answer() -> None:
    """100 + 100 + 2 tokens are not in 200 with the share of the answer that runs."""
    run = SchedulerRun("sglang-0.5", [(50, 50), (50, 50)], 185)
    assert {0: 50} == run.step().prompts


def test_only_a_share_of_running_answers_is_reserved() -> None:
    """Of the 49 tokens to come 0.7 are: 34.3 of the 135 that are free, and 100 fit."""
    run = SchedulerRun("sglang-0.5", [(50, 50)], 185)
    run.step()
    run.arrive(50, 50)
    assert {1: 50} == run.step().prompts


def test_once_full_nobody_is_admitted_until_one_has_left() -> None:
    """A short request behind a long one waits too, though it would fit."""
    run = SchedulerRun("sglang-0.5", [(50, 20), (50, 100), (5, 5)], 150)
    steps = run.run()
    first = next(number for number, step in enumerate(steps) if 2 in step.prompts)
    assert first >= 20


def _overcommitted(answer: int = 300, num_tokens: int = 600) -> SchedulerRun:
    """Return two requests that run in 600 tokens of cache, and will need 660."""
    run = SchedulerRun("sglang-0.5", [(30, answer)], num_tokens)
    run.step()
    run.arrive(30, answer)
    run.step()
    assert not run.waiting
    return run


def test_the_shortest_answer_is_taken_back_and_goes_last() -> None:
    """The later of two loses its blocks, and waits behind a third that did not fit."""
    run = _overcommitted()
    run.arrive(10, 560)
    steps = [run.step() for _ in range(280)]
    assert [(1,)] == [step.preempted for step in steps if step.preempted]
    assert [2, 1] == run.waiting


def test_a_retraction_loses_no_token() -> None:
    """Whoever was taken back computes its prompt and its answer so far again, and completes."""
    steps = _overcommitted().run()
    assert [step for step in steps if step.preempted]
    assert 2 * 300 == sum(len(step.decodes) + len(step.prompts) for step in steps)


@pytest.mark.parametrize(("answer", "is_admitted"), [(260, True), (262, False)])
def test_after_a_retraction_what_ran_so_far_is_reserved(answer: int, *, is_admitted: bool) -> None:
    """Who stays has 272 of 300 tokens: of the 28 to come (271 + 20) / 301 are reserved, 27.1.

    Of 600 - 30 - 272 = 298 free that leaves 270.9 for a prompt of 10 and its answer.
    """
    run = _overcommitted()
    run.arrive(10, answer)
    while not run.step().preempted:
        pass
    assert is_admitted == (2 in run.step().prompts)


@pytest.mark.parametrize(("answer", "is_admitted"), [(156, True), (157, False)])
def test_the_share_is_of_one_token_more_than_the_answers(answer: int, *, is_admitted: bool) -> None:
    """Of 26 tokens to come 183 / 191 are reserved; 183 / 190 would refuse a token earlier."""
    run = _overcommitted(190, 384)
    run.arrive(10, answer)
    while not run.step().preempted:
        pass
    assert is_admitted == (2 in run.step().prompts)


def test_mixed_prompts_have_what_decodes_leave() -> None:
    """All that runs decodes in the prompts' step, and its tokens count against the chunk."""
    run = SchedulerRun(
        "sglang-0.5", [(60, 5)], 1000, max_num_batched_tokens=100, mixes_prefill=True
    )
    run.step()
    run.arrive(150, 5)
    steps = [run.step() for _ in range(3)]
    assert [{1: 99}, {1: 51}, {}] == [step.prompts for step in steps]
    assert [{0}, {0}, {0, 1}] == [set(step.decodes) for step in steps]


def test_a_step_has_no_more_prompts_than_it_may() -> None:
    run = SchedulerRun("sglang-0.5", [(10, 5), (10, 5), (10, 5)], 1000, max_num_prefills=2)
    assert [{0: 10, 1: 10}, {2: 10}] == [run.step().prompts for _ in range(2)]
