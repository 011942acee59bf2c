"""What holds for every serving simulation, whatever arrives and however tight the cache is."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from serving_strategies import SCHEDULERS, Case, cases

from foretoken.simulator.engine.kernel import run_slice
from foretoken.simulator.engine.layout import MORE
from foretoken.simulator.engine.state import build_state
from foretoken.simulator.serving.record import RequestOutcome, ServingRecord
from foretoken.simulator.workload.request_plan import find_waits


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_requests_in_are_those_done_and_those_refused(scheduler: str) -> None:
    """Nothing hangs and nothing is lost; who is refused says why and gets nothing."""
    given(case=cases(scheduler))(_check_outcomes)()


def _check_outcomes(case: Case) -> None:
    requests = case.run().requests
    is_done = requests.outcome == RequestOutcome.COMPLETED
    is_refused = np.isin(
        requests.outcome, (RequestOutcome.CONTEXT_TOO_LONG, RequestOutcome.EXCEEDS_KV_CACHE)
    )
    assert (is_done ^ is_refused).all()
    assert (requests.finished_ns[is_refused] == -1).all()
    size = case.setup.profile.block_size
    num_kv_tokens = requests.num_prefill_tokens + requests.num_decode_tokens - 1
    fits = num_kv_tokens <= case.setup.num_kv_blocks * size
    fits &= num_kv_tokens < case.setup.max_context
    assert (is_done == fits).all()


@given(case=cases())
def test_every_token_of_an_answer_leaves_once(case: Case) -> None:
    """Tokens are conserved: as many as asked for, each at a later step than the one before."""
    record = case.run()
    num_tokens = np.zeros(case.plan.num_requests, dtype=np.int64)
    np.add.at(num_tokens, record.tokens.request, record.tokens.count)
    is_done = record.requests.outcome == RequestOutcome.COMPLETED
    assert (num_tokens == np.where(is_done, case.plan.num_decode_tokens, 0)).all()
    assert (np.diff(record.tokens.request) >= 0).all()
    is_same = np.diff(record.tokens.request) == 0
    tokens = record.tokens
    last_step = tokens.first_step + (tokens.count - 1) * tokens.stride
    assert (tokens.first_step[1:][is_same] > last_step[:-1][is_same]).all()
    assert ((tokens.stride >= 1) & (tokens.stride <= len(case.tables.tokens_us))).all()
    assert num_tokens.sum() == sum(int(step.num_rows.sum()) for step in record.steps)


@given(case=cases())
def test_times_of_a_request_come_in_order(case: Case) -> None:
    requests = case.run().requests
    is_done = requests.outcome == RequestOutcome.COMPLETED
    assert (requests.arrival_ns >= case.plan.arrival_ns).all()
    for earlier, later in (
        (requests.arrival_ns, requests.queued_ns),
        (requests.queued_ns, requests.scheduled_ns),
        (requests.scheduled_ns, requests.first_token_ns),
        (requests.first_token_ns, requests.finished_ns),
    ):
        assert (earlier <= later)[is_done].all()
    after, before = find_waits(case.plan.follows, case.plan.joins)
    are_done = is_done[after] & is_done[before]
    thought_ns = requests.finished_ns[before] + case.plan.think_ns[after]
    assert (requests.arrival_ns[after] >= thought_ns)[are_done].all()


@given(case=cases())
def test_the_clock_of_an_engine_never_goes_back(case: Case) -> None:
    for steps in case.run().steps:
        for times_ns in (steps.scheduled_ns, steps.start_ns, steps.end_ns, steps.seen_ns):
            assert (np.diff(times_ns) >= 0).all()
        assert (steps.scheduled_ns <= steps.start_ns).all()
        assert (steps.start_ns <= steps.end_ns).all()
        assert (steps.end_ns <= steps.seen_ns).all()


@given(case=cases())
def test_steps_keep_to_the_limits(case: Case) -> None:
    """Blocks, requests and tokens of a step are at most what the engine has and allows."""
    rules = case.setup.profile
    for steps in case.run().steps:
        assert (steps.num_used_blocks >= 0).all()
        assert (steps.num_used_blocks <= case.setup.num_kv_blocks).all()
        assert (steps.num_running <= rules.max_num_seqs).all()
        assert (steps.num_tokens <= rules.max_num_batched_tokens).all()
        assert (steps.num_decodes + steps.num_prefills <= steps.num_running).all()
        prefill_tokens = np.bincount(
            steps.prefill_step, weights=steps.prefill_tokens, minlength=len(steps.end_ns)
        )
        assert (steps.num_decodes + prefill_tokens == steps.num_tokens).all()


@given(case=cases())
def test_kv_blocks_are_conserved(case: Case) -> None:
    """When all requests are done nobody uses a block, and every one is in the list of free ones."""
    state = build_state(case.plan, case.setup, case.tables)
    while run_slice(state.record) == MORE:
        pass
    assert (state.arrays["engines"]["num_free"] == case.setup.num_kv_blocks).all()
    assert (state.arrays["engines"]["num_running"] == 0).all()
    blocks = state.arrays["blocks"].reshape(-1, case.setup.num_kv_blocks + 1)
    assert (blocks["num_users"] == 0).all()
    numbers = np.arange(blocks.size).reshape(blocks.shape)
    assert (np.sort(blocks["next"], axis=1) == numbers).all()


@given(case=cases())
def test_the_same_workload_gives_the_same_bytes(case: Case) -> None:
    first, second = (case.run() for _ in range(2))
    assert _columns(first) == _columns(second)


def _columns(record: ServingRecord) -> dict[str, list[int]]:
    parts: dict[str, object] = {"requests": record.requests, "tokens": record.tokens}
    parts |= {f"steps of engine {index}": steps for index, steps in enumerate(record.steps)}
    return {
        f"{part}: {item.name}": np.asarray(getattr(columns, item.name)).tolist()
        for part, columns in parts.items()
        for item in fields(columns)  # type: ignore[arg-type]
    }
