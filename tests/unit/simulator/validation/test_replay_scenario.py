"""The scenario of a run serves what the run served, on what the scenario says."""

from dataclasses import replace

from served_runs import serve

from foretoken.domain.models.load import load_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.serving_run import ServingRun
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.validation.measured_run import scenario_of_run
from foretoken.simulator.workload.request_plan import NONE
from foretoken.simulator.workload.requests import resolve_workload

_SCENARIO = ServingScenario(
    model=load_model("llama-3.1-8b"), device="a30", seed=7, workload=WorkloadSpec(rate_rps=99.0)
)


def test_arrivals_and_lengths_are_the_measured_ones() -> None:
    run = serve(num_requests=20).as_run()
    scenario = scenario_of_run(_SCENARIO, run)
    plan = resolve_workload(scenario.workload, (), scenario.seed)
    assert [round(r.arrival_s * 1e9) for r in run.completed] == plan.arrival_ns.tolist()
    assert [r.num_prefill_tokens for r in run.completed] == plan.num_prefill_tokens.tolist()
    assert [r.num_decode_tokens for r in run.completed] == plan.num_decode_tokens.tolist()
    assert (_SCENARIO.model, "a30", 7) == (scenario.model, scenario.device, scenario.seed)


def test_a_closed_loop_stays_one() -> None:
    run = replace(serve(num_requests=20).as_run(), concurrency=4)
    plan = resolve_workload(scenario_of_run(_SCENARIO, run).workload, (), 0)
    assert 4 == plan.concurrency
    assert [r.num_prefill_tokens for r in run.completed] == plan.num_prefill_tokens.tolist()


def test_the_ramp_of_a_closed_loop_is_the_measured_one() -> None:
    """The first ones arrive when they were sent if that was evenly; the rest wait for the last."""
    times = (0.0, 0.5, 1.0, 1.5, 1.6, 1.7)
    first, *_ = serve(num_requests=1).as_run().requests
    requests = tuple(
        replace(first, arrival_s=time_s, first_token_s=time_s + 1, last_token_s=time_s + 2)
        for time_s in times
    )
    run = ServingRun(
        requests=(*requests[1:], replace(requests[0], error="HTTP 500")), concurrency=4
    )
    plan = resolve_workload(scenario_of_run(_SCENARIO, run).workload, (), 0)
    assert [0.0, 0.5, 1.0, 1.5, 1.5] == (plan.arrival_ns / 1e9).round(6).tolist()
    at_once = replace(run, requests=tuple(replace(r, arrival_s=0.0) for r in requests))
    plan = resolve_workload(scenario_of_run(_SCENARIO, at_once).workload, (), 0)
    assert {0} == set(plan.arrival_ns.tolist())


def test_shared_content_stays_shared() -> None:
    run = serve(num_requests=2).as_run()
    named = tuple(replace(r, num_prefill_tokens=8, block_hashes=(3, 4)) for r in run.requests)
    run = replace(run, requests=named, hash_block_tokens=4)
    plan = resolve_workload(scenario_of_run(_SCENARIO, run).workload, (), 0)
    assert ([3, 4, 3, 4], 4) == (plan.hashes.tolist(), plan.hash_block_tokens)
    assert {NONE} == set(plan.follows.tolist())


def test_requests_that_failed_are_not_replayed() -> None:
    run = serve(num_requests=3).as_run()
    first, *rest = run.requests
    run = replace(run, requests=(replace(first, error="HTTP 500"), *rest))
    requests = scenario_of_run(_SCENARIO, run).workload.trace_requests
    assert (2, 0.0) == (len(requests), requests[0].arrival_s)
