"""Orca: whole prompts along with decodes; room for the answer is reserved on admission."""

from scheduler_steps import SchedulerRun


def test_whole_prompts_join_those_that_decode() -> None:
    """A step has both."""
    run = SchedulerRun("orca", [(20, 5)], 100)
    run.step()
    run.arrive(300, 5)
    step = run.step()
    assert ({1: 300}, {0}) == (step.prompts, step.decodes)


def test_the_answer_is_reserved() -> None:
    """10 blocks hold one request of 17 + 80 tokens, not two."""
    run = SchedulerRun("orca", [(17, 80), (17, 80)], 10)
    assert {0: 17} == run.step().prompts
    assert 6 == run.num_used


def test_nobody_is_preempted() -> None:
    """Whatever is admitted has its room."""
    steps = SchedulerRun("orca", [(30, 50)] * 8, 12).run()
    assert not [step for step in steps if step.preempted]


def test_the_number_of_requests_is_limited() -> None:
    """A third waits for one of two to leave."""
    run = SchedulerRun("orca", [(10, 4)] * 3, 100, max_num_seqs=2)
    assert {0: 10, 1: 10} == run.step().prompts
