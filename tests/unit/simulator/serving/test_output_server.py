"""The server that hands tokens out runs next to the engine, and one step's after the other's."""

from dataclasses import replace

import numpy as np
import pytest

from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.metrics import place_runs
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import plan_requests

_STEP_US = 10.0
_MANY = np.full(3, 4)


def _run(
    output_us_per_seq: float,
    concurrency: int = 0,
    num_decode: int = 4,
    output_us_per_past_token: float = 0.0,
) -> ServingRecord:
    """Three requests of a step for their prompts, and one for each further token."""
    profile = EngineProfile(
        name="mine",
        engine="mine",
        max_num_seqs=4,
        has_async_scheduling=True,
        output_us_per_seq=output_us_per_seq,
        output_us_per_past_token=output_us_per_past_token,
    )
    plan = replace(plan_requests(0 * _MANY, _MANY, 0 * _MANY + num_decode), concurrency=concurrency)
    setup = DeploymentSetup(profile=profile, num_kv_blocks=1000)
    return run_deployment(plan, setup, flat_tables(_STEP_US, 0.0), lambda _: None)


@pytest.mark.parametrize("num_decode", [4, 40])
def test_clients_wait_for_it_and_the_engine_does_not(num_decode: int) -> None:
    """Three tokens a step of 10 µs take 15 µs; of the last step all steps' tokens are ahead."""
    record = _run(5.0, num_decode=num_decode)
    ends, number = record.steps[0].end_ns, np.arange(1, num_decode + 1)
    assert (ends == 10_000 * number).all()
    assert (place_runs(record).seen_ns == 10_000 + 15_000 * number).all()
    assert (record.requests.first_token_ns == 25_000).all()
    assert (record.requests.finished_ns == 10_000 + 15_000 * num_decode).all()


@pytest.mark.parametrize("num_decode", [4, 40])
def test_a_token_takes_longer_the_longer_its_answer_is_so_far(num_decode: int) -> None:
    """Of three answers' tokens the first take 15 µs, and each next a µs more, step after step."""
    record = _run(5.0, num_decode=num_decode, output_us_per_past_token=1 / 3)
    seen_ns = 10_000 + np.cumsum(15_000 + 1_000 * np.arange(num_decode))
    assert (place_runs(record).seen_ns.reshape(-1, num_decode) == seen_ns).all()
    assert (record.requests.finished_ns == seen_ns[-1]).all()


def test_what_comes_before_it_is_of_the_same_answer() -> None:
    """One at a time: the first token of the second answer has none before it."""
    requests = _run(0.0, concurrency=1, output_us_per_past_token=2.0).requests
    first_ns = requests.first_token_ns - requests.arrival_ns
    assert (first_ns == first_ns[0]).all()


def test_one_that_keeps_up_adds_its_own_time_alone() -> None:
    at_once, served = _run(0.0), _run(2.0)
    assert (served.steps[0].end_ns == at_once.steps[0].end_ns).all()
    assert (served.steps[0].seen_ns == at_once.steps[0].end_ns + 6_000).all()
    assert at_once.steps[0].delivered_ns is None


def test_a_closed_loop_sends_the_next_request_when_the_last_token_was_seen() -> None:
    requests = _run(5.0, concurrency=1).requests
    assert (requests.arrival_ns[1:] == requests.finished_ns[:-1]).all()
    assert (requests.finished_ns - requests.arrival_ns >= 4 * 10_000 + 5_000).all()
