"""A trace that a search is about is kept once."""

import json
from typing import cast

from serving_fakes import RooflinePredictor

from foretoken.domain.models.architecture import find_model
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest, ServingSpace
from foretoken.domain.requests.simulated_answer import read_finalist
from foretoken.domain.requests.workload import Request, WorkloadSpec
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import ServingSearch
from foretoken.simulator.serving.simulation import resolved_json


def test_a_trace_is_kept_once_whatever_is_simulated_of_it() -> None:
    """In the request: a finalist says the rest, and is read as it was simulated."""
    rows = tuple(
        Request(arrival_s=0.05 * n, num_prefill_tokens=100 + n, num_decode_tokens=20)
        for n in range(300)
    )
    request = ServingSearchRequest(
        scenario=ServingScenario(
            model=find_model("llama-3.1-8b"),
            device="h200_sxm",
            workload=WorkloadSpec(arrival="trace", trace_requests=rows),
        ),
        space=ServingSpace(max_devices=2, tp=(1, 2), max_num_seqs=(8,)),
        num_finalists=2,
    )
    search = ServingSearch(cast("PredictorPort", RooflinePredictor()))

    report = search.run(request, InlineContext())

    assert report.finalists
    for finalist in report.finalists:
        for text in (finalist.scenario_json, finalist.report.scenario_json):
            assert len(text) < len(report.request_json) / 2
        read = read_finalist(report, finalist)
        assert rows == tuple(read.workload.trace_requests)
        assert finalist.scenario_json == resolved_json(read)
        assert json.loads(report.request_json)["scenario"]["workload"]["trace_requests"]
