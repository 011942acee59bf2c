"""The scenario that serves what a measured run served."""

from collections.abc import Mapping
from dataclasses import replace

from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.serving_run import MeasuredRequest, ServingRun
from foretoken.domain.requests.workload import Request, WorkloadSpec


def scenario_of_run(scenario: ServingScenario, run: ServingRun) -> ServingScenario:
    """Return the scenario with the run's completed requests as its workload.

    Each arrives when it was measured to; those of a closed loop arrive in the measured order, when
    one before is complete in the simulation, the first ones over the time that it took to send
    them. Answers are as long as the measured ones were.
    """
    start_s = min(request.arrival_s for request in run.completed)
    workload = WorkloadSpec(
        arrival="trace",
        arrival_options=_loop_options(run),
        trace_requests=tuple(_to_request(request, start_s) for request in run.completed),
        hash_block_tokens=run.hash_block_tokens,
    )
    return replace(scenario, workload=workload)


def _loop_options(run: ServingRun) -> Mapping[str, str]:
    if not run.concurrency:
        return {}
    # Those that failed took a place too. The last of the ramp begins one place before its end.
    begun_s = sorted(request.arrival_s for request in run.requests)[: run.concurrency]
    ramp_s = (begun_s[-1] - begun_s[0]) * len(begun_s) / max(len(begun_s) - 1, 1)
    return {"concurrency": str(run.concurrency), "ramp_s": repr(ramp_s)}


def _to_request(request: MeasuredRequest, start_s: float) -> Request:
    return Request(
        arrival_s=request.arrival_s - start_s,
        num_prefill_tokens=request.num_prefill_tokens,
        num_decode_tokens=request.num_decode_tokens,
        block_hashes=request.block_hashes,
    )
