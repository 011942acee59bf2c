"""Chunked prefill, step by step."""

from scheduler_steps import SchedulerRun


def _run(requests: list[tuple[int, int]], num_blocks: int = 100, **rules: object) -> SchedulerRun:
    return SchedulerRun("plain", requests, num_blocks, **{"block_size": 4, **rules})


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests() -> None:
    engine = _run([(3, 5), (14, 2)], max_num_batched_tokens=8)
    assert engine.step().prompts == {0: 3, 1: 5}
    second = engine.step()
    assert (second.decodes, second.prompts) == ({0}, {1: 7})
    third = engine.step()
    assert (third.decodes, third.prompts) == ({0}, {1: 2})


def test_a_last_chunk_of_one_token_decodes() -> None:
    """Kernels take one new token over a context for a decode, whoever it belongs to."""
    engine = _run([(5, 2)], max_num_batched_tokens=4)
    assert engine.step().prompts == {0: 4}
    assert (engine.step().decodes, engine.requests["num_emitted"][0]) == ({0}, 1)


def test_waiting_requests_come_in_order_and_only_as_many_as_may_run() -> None:
    engine = _run([(4, 4)] * 3, max_num_seqs=2)
    assert engine.step().prompts == {0: 4, 1: 4}
    assert engine.waiting == [2]


def test_a_request_without_room_holds_up_those_behind_it() -> None:
    assert _run([(4, 1), (12, 1), (4, 1)], num_blocks=3).step().prompts == {0: 4}


def test_admission_by_prompt_wants_room_for_all_of_it() -> None:
    requests = [(4, 1), (12, 1)]
    limits = {"num_blocks": 3, "max_num_batched_tokens": 8}
    assert _run(requests, admission="chunk", **limits).step().prompts == {0: 4, 1: 4}
    assert _run(requests, admission="prompt", **limits).step().prompts == {0: 4}


def test_a_step_computes_so_much_of_a_prompt_and_so_many_prompts() -> None:
    assert _run([(9, 1), (9, 1)], max_chunk_tokens=5).step().prompts == {0: 5, 1: 5}
    assert _run([(9, 1), (9, 1)], max_num_prefills=1).step().prompts == {0: 9}


def test_the_latest_is_preempted_and_waits_in_front_to_compute_all_again() -> None:
    engine = _run([(7, 9), (7, 9), (4, 1)], num_blocks=4)
    engine.step()
    engine.step()
    third = engine.step()
    assert (third.decodes, third.preempted) == ({0}, (1,))
    assert engine.waiting == [1, 2]
    second = engine.requests[engine.waiting[0]]
    assert (second["num_computed"], second["num_blocks"], second["num_preemptions"]) == (0, 0, 1)
    # Its two tokens are part of what it computes again; the user keeps them.
    assert (second["num_emitted"], second["num_generated"]) == (2, 2)


def test_a_request_that_is_itself_the_latest_is_preempted() -> None:
    engine = _run([(8, 3), (8, 3)], num_blocks=4)
    engine.step()
    engine.state.arrays["running"][0, 0] = 1  # the blocks of the first stay taken
    engine.state.arrays["engines"]["num_running"] = 1
    assert engine.step().preempted == (1,)
    assert engine.waiting == [1]
