"""Sarathi: decodes first, the rest of a step of fixed size is filled with pieces of prompts."""

from scheduler_steps import SchedulerRun


def test_decodes_and_pieces_share_the_budget() -> None:
    """A decoding request takes one token of the hundred."""
    run = SchedulerRun("sarathi", [(20, 5)], 100, max_num_batched_tokens=100)
    run.step()
    run.arrive(300, 5)
    step = run.step()
    assert ({1: 99}, {0}) == (step.prompts, step.decodes)


def test_a_prompt_begun_goes_before_a_new_one() -> None:
    """The first prompt's last piece leaves room for the second's first."""
    run = SchedulerRun("sarathi", [(150, 2), (100, 2)], 100, max_num_batched_tokens=100)
    assert [{0: 100}, {0: 50, 1: 50}] == [run.step().prompts for _ in range(2)]


def test_a_prompt_gets_all_its_blocks_at_once() -> None:
    """After its first piece it holds what the whole needs."""
    run = SchedulerRun("sarathi", [(320, 2)], 100, max_num_batched_tokens=100)
    run.step()
    assert 20 == run.num_used


def test_a_request_that_does_not_fit_beside_the_watermark_waits() -> None:
    """Of 100 blocks 50 and one are not there for the second."""
    run = SchedulerRun("sarathi", [(800, 2), (800, 2)], 100, max_num_batched_tokens=2000)
    assert {0: 800} == run.step().prompts


def test_the_latest_request_is_preempted() -> None:
    """When blocks run out the first goes on."""
    steps = SchedulerRun("sarathi", [(64, 30), (64, 30)], 11).run()
    assert {1} == {index for step in steps for index in step.preempted}
