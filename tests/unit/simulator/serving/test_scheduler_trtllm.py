"""TensorRT-LLM: decodes first, prompts as a whole, and no request starts that might be evicted."""

from scheduler_steps import SchedulerRun


def test_a_prompt_joins_only_as_a_whole() -> None:
    """Next to one that decodes 99 of 100 tokens are left."""
    run = SchedulerRun("trtllm-1.0", [(20, 5)], 100, max_num_batched_tokens=100)
    run.step()
    run.arrive(100, 5)
    step = run.step()
    assert ({}, {0}) == (step.prompts, step.decodes)


def test_a_prompt_is_split_where_the_rules_say_so() -> None:
    """With chunks it takes what is left."""
    run = SchedulerRun(
        "trtllm-1.0", [(20, 5)], 100, max_num_batched_tokens=100, max_chunk_tokens=8192
    )
    run.step()
    run.arrive(100, 5)
    assert {1: 99} == run.step().prompts


def test_nobody_is_preempted() -> None:
    """Room for prompt and answer is there before a request starts."""
    steps = SchedulerRun("trtllm-1.0", [(30, 90)] * 8, 12).run()
    assert not [step for step in steps if step.preempted]


def test_a_request_starts_when_its_last_block_is_sure() -> None:
    """Four blocks each: the third of three waits for one of the first two."""
    run = SchedulerRun("trtllm-1.0", [(30, 90)] * 3, 8)
    assert {0: 30, 1: 30} == run.step().prompts
