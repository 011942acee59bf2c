"""What the closed form knows of a workload."""

from typing import cast

import pytest

from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest, ServingSpace
from foretoken.domain.requests.workload import LengthSpec, Request, WorkloadSpec
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.load import profile_load
from foretoken.simulator.search.serving.search import ServingSearch


class _Silent:
    """A predictor that knows no time."""

    def list_models(self) -> tuple[ModelVersion, ...]:
        return ()

    def predict(self, query: LatencyQuery) -> LatencyReply:
        raise NotImplementedError(query)


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
    assert (load.shortest, load.longest) == (108, 308)


def test_requests_longer_than_the_model_reads_are_ruled_out() -> None:
    """Of a deployment that refuses everybody no time is predicted."""
    workload = WorkloadSpec(num_requests=8, prefill=LengthSpec(kind="fixed", mean=1_000_000))
    request = ServingSearchRequest(
        scenario=ServingScenario(model="llama-3.1-8b", device="h100_sxm", workload=workload),
        space=ServingSpace(max_devices=2),
    )

    # A search queries a predictor for no more than this.
    report = ServingSearch(cast("PredictorPort", _Silent())).run(request, InlineContext())

    assert (report.best, report.num_evaluated, report.num_simulated) == ("", 0, 0)
    counts = report.num_ruled_out_by_verdict
    assert counts["context"] == report.num_distinct - counts.get("devices", 0)
