"""The steady part of a run: where it begins, and that its rates are those of Little's law."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.domain.frameworks.engine import find_engine
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.units import MS_PER_S
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.search.serving.finalists import (
    LoadTask,
    find_warm_up,
    is_steady,
    list_counts,
    mean_under_way,
    measure_between,
)
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import plan_requests

_ROUNDS = 12


def _run_loop(concurrency: int, seed: int, ramp_ns: int, profile: str) -> ServingRecord:
    """Return a closed loop of random lengths, the first of which come over the ramp."""
    rng = np.random.default_rng(seed)
    num = _ROUNDS * concurrency
    ramp = np.minimum(np.arange(num), concurrency - 1) * (ramp_ns // concurrency)
    prompts, answers = rng.integers(20, 400, num), rng.integers(2, 60, num)
    plan = replace(plan_requests(ramp, prompts, answers), concurrency=concurrency)
    rules = replace(find_engine(profile), max_num_seqs=concurrency, max_num_batched_tokens=512)
    setup = DeploymentSetup(profile=rules, num_kv_blocks=100_000)
    return run_deployment(plan, setup, flat_tables(1000.0, 10.0), lambda _: None)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(min_value=1, max_value=12),
    st.integers(min_value=0, max_value=10_000),
    st.sampled_from([0, 10**8]),
    st.sampled_from(["vllm-0.20", "sglang-0.5"]),
)
def test_a_closed_loop_obeys_littles_law(
    concurrency: int, seed: int, ramp_ns: int, profile: str
) -> None:
    """Requests/s times how long each takes are the loop's places, to 0.1 %.

    The rate is that of what was really served: a count of completions is near it.
    """
    record = _run_loop(concurrency, seed, ramp_ns, profile)
    first, end = 3 * concurrency, (_ROUNDS - 1) * concurrency

    found = measure_between(record, first, end, is_loop=True)

    residence_s = found.e2e_latency_ms.mean / MS_PER_S
    assert found.request_throughput_rps * residence_s == pytest.approx(concurrency, rel=1e-3)
    assert abs(found.num_requests - (end - first)) <= concurrency
    counted = measure_between(record, first, end).request_throughput_rps
    # What is under way at either end is a round each at the most.
    assert abs(found.request_throughput_rps / counted - 1) < 2 * concurrency / (end - first)


def test_while_a_loop_fills_and_empties_fewer_are_under_way() -> None:
    """A window that reaches into the ramp or the end has not all places in use."""
    record = _run_loop(8, 1, 10**9, "vllm-0.20")
    requests = record.requests
    last_ns = int(np.asarray(requests.finished_ns).max())

    assert mean_under_way(record, 0, 10**9) < 7
    assert mean_under_way(record, last_ns - last_ns // 50, last_ns) < 7.5
    middle_ns = (10**9 + last_ns) // 2
    assert mean_under_way(record, middle_ns, middle_ns + 10**7) == pytest.approx(8)


@pytest.mark.parametrize("num_slow", [0, 40, 200])
def test_a_warm_up_ends_where_waits_become_alike(num_slow: int) -> None:
    """So many requests that wait far longer are left out, to a batch of five."""
    record = _run_loop(8, 2, 0, "vllm-0.20")
    requests = record.requests
    num = 600
    rng = np.random.default_rng(3)
    wait_ns = rng.integers(90, 110, num) + 1000 * (np.arange(num) < num_slow)
    arrival = np.arange(num) * 50
    changed = replace(
        requests,
        **{
            name: np.zeros(num, dtype=np.int64)
            for name in ("outcome", "num_prefill_tokens", "num_decode_tokens")
        },
        arrival_ns=arrival,
        first_token_ns=arrival + wait_ns,
        finished_ns=arrival + wait_ns + 1000,
    )

    found = find_warm_up(replace(record, requests=changed))

    assert num_slow <= found <= num_slow + 100


def test_what_never_becomes_steady_is_all_warm_up() -> None:
    """Where each request waits longer than the one before there is no steady part."""
    record = _run_loop(8, 2, 0, "vllm-0.20")
    num = 200
    arrival = np.arange(num) * 50
    waits = 100 * np.arange(num) + np.arange(num) % 7
    changed = replace(
        record.requests,
        arrival_ns=arrival,
        first_token_ns=arrival + waits,
        finished_ns=arrival + waits + 1000,
    )

    assert find_warm_up(replace(record, requests=changed)) == num


@pytest.mark.parametrize(("growth", "expected"), [(0, True), (5, True), (40, False)])
def test_a_loop_is_steady_whose_rounds_are_alike(growth: int, expected: bool) -> None:
    """A wait may depend on the place in a round, but may not change much from round to round."""
    record = _run_loop(8, 2, 0, "vllm-0.20")
    num_round, num_rounds = 80, 5
    num = num_round * num_rounds
    arrival = np.arange(num) * 50
    # The first places wait far longer than the last; half of a run is two rounds and a half.
    place_ns = np.tile(np.linspace(900, 100, num_round).astype(np.int64), num_rounds)
    waits = place_ns + growth * (np.arange(num) // num_round)
    changed = replace(
        record.requests,
        arrival_ns=arrival,
        first_token_ns=arrival + waits,
        finished_ns=arrival + waits + 1000,
    )
    loop = replace(record, requests=changed)

    assert expected == is_steady(loop, num_round)


@pytest.mark.parametrize(
    ("num_longer", "is_loop", "expected"),
    [
        (0, True, [800]),
        (2, False, [800, 1300, 2300]),
        (1, True, [800, 900, 1000, 1100, 1200, 1300]),
    ],
)
def test_a_loop_is_looked_at_after_every_round(
    num_longer: int, expected: list[int], *, is_loop: bool
) -> None:
    """Of 100 under way; what begins anew for a longer warm-up only when that was doubled."""
    task = LoadTask(
        scenario=ServingScenario(model="llama-3.1-8b", device="h100_sxm"),
        num_parts=1,
        num_under_way=100,
        num_measured=200,
        num_longer=num_longer,
        wants_report=True,
    )
    assert expected == list_counts(task, 800, is_loop=is_loop)
