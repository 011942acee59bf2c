"""What a search keeps for the next, by what it rests on."""

from dataclasses import replace

from serving_fakes import RooflinePredictor

from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest, ServingSpace
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import ServingSearch

_REQUEST = ServingSearchRequest(
    scenario=ServingScenario(
        model=find_model("llama-3.1-8b"),
        device="h200_sxm",
        workload=WorkloadSpec(
            num_requests=8, prefill=LengthSpec(mean=500), decode=LengthSpec(mean=20)
        ),
    ),
    space=ServingSpace(
        max_devices=1,
        modes=("aggregated",),
        tp=(1,),
        max_num_seqs=(8,),
        max_num_batched_tokens=(2048,),
    ),
    num_finalists=1,
)


class _Learning(RooflinePredictor):
    """Has no active model: what it learned of the catalog so far answers, by its own version."""

    version = "learned-1"

    def predict(self, query: LatencyQuery) -> LatencyReply:
        return replace(super().predict(query), model_version=self.version)


def test_finalists_of_a_predictor_without_a_model_are_found_while_it_learns_nothing() -> None:
    """Its answer in closed form is fetched each time, and says whether the finalists' are known."""
    predictor = _Learning()
    search, counts = ServingSearch(predictor), []
    for version in ("learned-1", "learned-1", "learned-2"):
        predictor.version = version
        before = len(predictor.queries)
        report = search.run(_REQUEST, InlineContext())
        assert version == report.model_version
        counts.append(len(predictor.queries) - before)
    assert counts[0] == counts[2] > counts[1] > 0
