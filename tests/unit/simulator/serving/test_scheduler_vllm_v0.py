"""vLLM V0: prompts in batches of their own, a watermark, preemption by recompute or swap."""

from scheduler_steps import SchedulerRun


def test_prompts_come_before_decodes() -> None:
    """A prompt that waits is computed while those that run pause."""
    run = SchedulerRun("vllm-v0", [(20, 5)], 100)
    run.step()
    run.arrive(30, 5)
    step = run.step()
    assert ({1: 30}, frozenset()) == (step.prompts, step.decodes)


def test_no_step_mixes_prompts_and_decodes() -> None:
    """Every step has only the one or only the other."""
    steps = SchedulerRun("vllm-v0", [(20, 5), (600, 3), (40, 9)], 200, max_num_seqs=2).run()
    assert not [step for step in steps if step.prompts and step.decodes]


def test_a_batch_of_prompts_keeps_the_budget() -> None:
    """Prompts join as a whole as long as their sum fits."""
    run = SchedulerRun("vllm-v0", [(40, 2), (50, 2), (30, 2)], 100, max_num_batched_tokens=100)
    assert {0: 40, 1: 50} == run.step().prompts


def test_padding_counts_where_the_rule_says_so() -> None:
    """Two prompts of at most 60 tokens count as 120."""
    run = SchedulerRun(
        "vllm-v0", [(40, 2), (60, 2)], 100, max_num_batched_tokens=110, counts_padding=True
    )
    assert {0: 40} == run.step().prompts


def test_a_prompt_beyond_the_budget_is_computed_in_pieces() -> None:
    """It runs alone, and is not refused."""
    steps = SchedulerRun("vllm-v0", [(250, 1)], 100, max_num_batched_tokens=100).run()
    assert [{0: 100}, {0: 100}, {0: 50}] == [step.prompts for step in steps]


def test_the_watermark_stays_free_on_admission() -> None:
    """Of 100 blocks, one (1 %) is not given to a new request while one runs."""
    run = SchedulerRun("vllm-v0", [(16 * 50, 2), (16 * 50, 2)], 100)
    assert {0: 800} == run.step().prompts


def test_the_latest_request_is_preempted_and_computes_everything_again() -> None:
    """The second loses its blocks when the first fills five, with 17 tokens of its answer."""
    steps = SchedulerRun("vllm-v0", [(16 * 4, 30), (16 * 4, 30)], 11).run()
    assert {1} == {index for step in steps for index in step.preempted}
    assert [64, 64 + 17] == [step.prompts[1] for step in steps if 1 in step.prompts]


def test_a_swapped_request_goes_on_without_its_prompt() -> None:
    """Its blocks come back from the tier, nothing is computed twice."""
    run = SchedulerRun("vllm-v0", [(16 * 4, 30), (16 * 4, 30)], 11, preemption="swap")
    steps = run.run()
    assert {1} == {index for step in steps for index in step.preempted}
    assert 128 == sum(sum(step.prompts.values()) for step in steps)


def test_nobody_new_comes_before_a_swapped_request() -> None:
    """The third would fit where the second waits for its blocks."""
    run = SchedulerRun("vllm-v0", [(64, 30), (64, 30)], 11, preemption="swap")
    while run.waiting[:1] != [1] or run.requests["num_generated"][run.running[0]] == 0:
        run.step()
    run.arrive(1, 1)
    assert {} == run.step().prompts
