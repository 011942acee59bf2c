from collections import deque

from foretoken.simulator.serving.batch import Batch, StepBudget
from foretoken.simulator.serving.kv_cache import KvCache
from foretoken.simulator.serving.request import SimRequest
from foretoken.simulator.serving.schedulers.chunked_prefill import SCHEDULER


class _Engine:
    """Queues and cache around the scheduler; `step` schedules and applies one batch."""

    def __init__(self, budget: StepBudget, num_blocks: int = 100, block_size: int = 4) -> None:
        self.budget = budget
        self.kv = KvCache(num_blocks, block_size)
        self.running: list[SimRequest] = []
        self.waiting: deque[SimRequest] = deque()
        self.num_steps = 0

    def add(self, num_prefill: int, num_decode: int) -> SimRequest:
        index = len(self.waiting) + len(self.running)
        request = SimRequest(index, 0, num_prefill, num_decode)
        self.waiting.append(request)
        return request

    def step(self) -> Batch:
        batch = SCHEDULER.select(self.running, self.waiting, self.budget, self.kv)
        decodes = [(request, 1) for request in batch.decodes]
        for request, num_tokens in decodes + batch.prefills:
            request.compute(num_tokens, self.num_steps)
        self.num_steps += 1
        return batch


def _prefills(batch: Batch) -> list[tuple[int, int]]:
    return [(request.index, num_tokens) for request, num_tokens in batch.prefills]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests() -> None:
    engine = _Engine(StepBudget(num_tokens=8, num_seqs=10))
    short, _ = engine.add(3, 5), engine.add(14, 2)
    assert _prefills(engine.step()) == [(0, 3), (1, 5)]
    second = engine.step()
    assert (second.decodes, _prefills(second)) == ([short], [(1, 7)])
    third = engine.step()
    assert (third.decodes, _prefills(third), third.num_tokens) == ([short], [(1, 2)], 3)


def test_a_last_chunk_of_one_token_decodes() -> None:
    """Kernels take one new token over a context for a decode, whoever it belongs to."""
    engine = _Engine(StepBudget(num_tokens=4, num_seqs=10))
    request = engine.add(5, 2)
    engine.step()
    assert engine.step().decodes == [request]
    assert request.num_generated == 1


def test_waiting_requests_come_in_order_and_only_as_many_as_may_run() -> None:
    engine = _Engine(StepBudget(num_tokens=100, num_seqs=2))
    for _ in range(3):
        engine.add(4, 4)
    assert _prefills(engine.step()) == [(0, 4), (1, 4)]
    assert [request.index for request in engine.waiting] == [2]


def test_a_request_without_room_holds_up_those_behind_it() -> None:
    engine = _Engine(StepBudget(num_tokens=100, num_seqs=10), num_blocks=3)
    engine.add(4, 1)
    engine.add(12, 1)
    engine.add(4, 1)
    assert _prefills(engine.step()) == [(0, 4)]


def test_the_latest_is_preempted_and_waits_in_front_to_compute_all_again() -> None:
    engine = _Engine(StepBudget(num_tokens=100, num_seqs=10), num_blocks=4)
    first, second = engine.add(7, 9), engine.add(7, 9)
    third = engine.add(4, 1)
    engine.step()
    engine.step()
    batch = engine.step()
    assert (batch.decodes, batch.preempted) == ([first], [second])
    assert list(engine.waiting) == [second, third]
    assert (second.num_computed, second.num_blocks, second.num_preemptions) == (0, 0, 1)
    # Its two tokens are part of what it computes again; the user keeps them.
    assert (second.num_generated, second.num_uncomputed) == (2, 9)


def test_a_request_that_is_itself_the_latest_is_preempted() -> None:
    engine = _Engine(StepBudget(num_tokens=100, num_seqs=10), num_blocks=4)
    _, second = engine.add(8, 3), engine.add(8, 3)
    engine.step()
    engine.running.remove(engine.running[0])  # its blocks stay taken
    batch = engine.step()
    assert (batch.preempted, engine.running, engine.waiting[0]) == ([second], [], second)


def test_a_request_waits_while_a_later_one_is_in_flight() -> None:
    engine = _Engine(StepBudget(num_tokens=100, num_seqs=10), num_blocks=4)
    first, second = engine.add(8, 3), engine.add(8, 3)
    engine.step()
    engine.running.remove(second)
    engine.budget = engine.budget._replace(num_in_flight=1)
    batch = engine.step()
    assert (batch.is_empty, batch.preempted, engine.running) == (True, [], [first])
