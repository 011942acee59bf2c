"""Static batching: nobody joins a batch until all its requests are complete."""

from scheduler_steps import SchedulerRun


def test_nobody_joins_a_batch_that_runs() -> None:
    """The third request waits for the longest of the first two."""
    run = SchedulerRun("faster-transformer", [(10, 3), (10, 9)], 100)
    run.step()
    run.arrive(10, 2)
    steps = run.run()
    assert [9] == [number for number, step in enumerate(steps) if 2 in step.prompts]


def test_all_of_a_batch_are_padded_in_the_cache() -> None:
    """With 10 blocks a batch of two whose longest needs 6 does not fit."""
    run = SchedulerRun("faster-transformer", [(17, 80), (17, 4)], 10)
    assert {0: 17} == run.step().prompts


def test_without_padding_each_takes_its_own() -> None:
    """6 and 2 of 10 blocks."""
    run = SchedulerRun("faster-transformer", [(17, 80), (17, 4)], 10, counts_padding=False)
    assert {0: 17, 1: 17} == run.step().prompts


def test_prompts_are_padded_in_the_step() -> None:
    """Three prompts of at most 50 tokens count as 150."""
    run = SchedulerRun(
        "faster-transformer", [(50, 2), (20, 2), (20, 2)], 100, max_num_batched_tokens=140
    )
    assert {0: 50, 1: 20} == run.step().prompts
