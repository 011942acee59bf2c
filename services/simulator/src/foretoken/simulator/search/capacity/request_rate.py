"""The rate of a workload, and the same requests at another one."""

from dataclasses import fields, replace

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.serving.lora import assign_adapters
from foretoken.simulator.serving.outcome import rate_of
from foretoken.simulator.workload.request_plan import NONE, Ints, RequestPlan
from foretoken.simulator.workload.requests import resolve_workload

# Arrivals later than this, 146 years, do not fit with what the simulation adds to them.
_MAX_NS = 2.0**62
# What a plan has besides columns that are taken row by row.
_NOT_COLUMNS = {
    "follows",
    "think_ns",
    "hash_offsets",
    "hashes",
    "hash_block_tokens",
    "concurrency",
}


def draw_plan(scenario: ServingScenario, seed: int) -> RequestPlan:
    """Return the requests of a scenario, drawn with a seed.

    Raises:
        InvalidRequestError, UnknownPluginError: the workload cannot be used.

    """
    plan = resolve_workload(scenario.workload, scenario.slo_classes, seed)
    return assign_adapters(plan, scenario.lora, seed)


def rate_of_plan(spec: WorkloadSpec, plan: RequestPlan) -> float:
    """Return the rate per second at which a plan was made of its workload.

    Of a synthetic workload that is what its `rate_rps` states (sessions, where it has them), of
    all others the arrivals over the time they take.

    Raises:
        InvalidRequestError: the workload has no rate: a closed loop, or all arrive at once.

    """
    if plan.concurrency:
        raise InvalidRequestError.of_field(
            "workload.arrival",
            "a closed loop has no rate to search: its requests wait for each other; give arrivals"
            " a rate, such as arrival: poisson with rate_rps, or a trace at its times",
        )
    realised_rps = rate_of(plan.arrival_ns)
    if realised_rps == 0:
        raise InvalidRequestError.of_field(
            "workload", "its requests arrive all at once, so there is no rate to search"
        )
    if spec.trace_requests or "rates_rps" in spec.arrival_options:
        return realised_rps
    return spec.rate_rps / spec.time_scale


def stretch_plan(plan: RequestPlan, ratio: float) -> RequestPlan:
    """Return the plan with the times of arrival times `ratio`; think times stay.

    Raises:
        InvalidRequestError: the times are too large.

    """
    arrival_ns = np.rint(plan.arrival_ns * ratio)
    if arrival_ns[-1] > _MAX_NS:
        raise InvalidRequestError.of_field("workload", "the rate is too low: times overflow")
    return replace(plan, arrival_ns=arrival_ns.astype(np.int64))


def stretch_scenario(scenario: ServingScenario, ratio: float) -> ServingScenario:
    """Return the scenario whose workload arrives in time times `ratio`."""
    workload = scenario.workload
    if workload.trace_requests or workload.arrival_options or workload.time_scale != 1:
        stretched = replace(workload, time_scale=workload.time_scale * ratio)
    else:
        stretched = replace(workload, rate_rps=workload.rate_rps / ratio)
    return replace(scenario, workload=stretched)


def take_requests(plan: RequestPlan, rows: Ints) -> RequestPlan:
    """Return some requests of a plan, by ascending index.

    One that followed a request that was left out follows nothing.
    """
    place = np.full(plan.num_requests + 1, NONE, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    # Of a request that follows nothing the index is -1, which is the place after the last.
    follows = place[plan.follows[rows]]
    counts = np.diff(plan.hash_offsets)[rows]
    offsets = np.concatenate(([0], np.cumsum(counts)))
    source = np.repeat(plan.hash_offsets[rows] - offsets[:-1], counts) + np.arange(offsets[-1])
    columns = {
        column.name: getattr(plan, column.name)[rows]
        for column in fields(plan)
        if column.name not in _NOT_COLUMNS and getattr(plan, column.name) is not None
    }
    return replace(
        plan,
        **columns,
        follows=follows,
        think_ns=np.where(follows == NONE, 0, plan.think_ns[rows]),
        hash_offsets=offsets,
        hashes=plan.hashes[source],
    )
