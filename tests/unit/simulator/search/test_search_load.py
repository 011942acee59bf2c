"""What the closed form knows of a workload."""

import pytest

from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.simulator.search.serving.load import profile_load


def test_a_long_trace_is_known_by_requests_of_all_its_parts() -> None:
    requests = tuple(
        Request(
            arrival_s=float(at), num_prefill_tokens=100 if at < 2000 else 300, num_decode_tokens=8
        )
        for at in range(4000)
    )
    workload = WorkloadSpec(arrival="trace", trace_requests=requests)
    load = profile_load(ServingScenario(model="llama-3.1-8b", device="a30", workload=workload))
    assert pytest.approx(200.0, rel=1e-3) == load.prefill_mean
    assert 308 == load.longest
