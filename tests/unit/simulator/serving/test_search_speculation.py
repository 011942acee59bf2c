"""A search over speculation: its closed form against its simulation, and what cannot be."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from serving_fakes import RooflinePredictor

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.cluster import SpeculativeSpec, settle_speculation
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
)
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import ServingSearch


def _search(speculations: tuple[str, ...], num_finalists: int = 0, **changes: Any) -> Any:
    lengths = {"prefill": LengthSpec(mean=500), "decode": LengthSpec(mean=200)}
    scenario = ServingScenario(
        model=find_model("llama-3.1-8b"),
        device="h200_sxm",
        workload=WorkloadSpec(num_requests=8, **lengths),
    )
    request = ServingSearchRequest(
        scenario=replace(scenario, **changes),
        space=ServingSpace(
            max_devices=2,
            modes=("aggregated",),
            tp=(1,),
            max_num_seqs=(48,),
            max_num_batched_tokens=(2048,),
            speculations=speculations,
        ),
        num_finalists=num_finalists,
    )
    return ServingSearch(cast("PredictorPort", RooflinePredictor())).run(request, InlineContext())


def _tpot_ms(report: ServingSearchReport, name: str) -> float:
    (place,) = np.flatnonzero(np.asarray(report.candidates.speculation) == name)
    return float(np.asarray(report.candidates.tpot_ms)[place])


@pytest.mark.parametrize("profile", ["vllm-0.31", "sglang-0.5.20", "trtllm-1.0"])
@pytest.mark.parametrize("speculation", ["none", "ngram:3", "layers:1", "layers:4"])
def test_the_closed_form_is_near_the_simulation(profile: str, speculation: str) -> None:
    """As near as without drafts, whose own error is the distance of means from a busy loop."""
    # Prompts that wait for the host's launches leave eight requests no steady state.
    engine = EngineSpec(profile=profile, rules={"launch_us": "0"})
    report = _search((speculation,), num_finalists=1, engine=engine)
    (finalist,) = report.finalists
    assert pytest.approx(finalist.report.tpot_ms.mean, rel=0.06) == _tpot_ms(report, speculation)


def test_every_method_is_a_candidate_of_its_own() -> None:
    report = _search(("none", "ngram:3", "layers:2"))
    assert {"none", "ngram:3", "layers:2"} == set(report.candidates.speculation)
    assert 3 == len(set(report.candidates.name))


def test_without_the_option_it_is_the_scenarios() -> None:
    spec = SpeculativeSpec(method="layers", num_draft_tokens=2)
    given, named = _search((), speculative=spec), _search(("layers:2",), speculative=spec)
    assert _tpot_ms(given, "") == _tpot_ms(named, "layers:2")


def test_drafts_that_are_never_accepted_only_cost() -> None:
    spec = SpeculativeSpec(acceptance_ratio=0.0)
    report = _search(("none", "layers:2"), speculative=spec)
    assert _tpot_ms(report, "none") < _tpot_ms(report, "layers:2")


def test_engines_that_do_not_speculate_are_ruled_out() -> None:
    report = _search(("none", "ngram:3"), engine=EngineSpec(profile="sarathi"))
    reasons = dict(
        zip(report.candidates.speculation, map(str, report.candidates.reason), strict=True)
    )
    assert not reasons["none"]
    assert "does not speculate" in reasons["ngram:3"]


@pytest.mark.parametrize(
    ("text", "given", "problem"),
    [
        ("guess:3", None, "is not one of none"),
        ("ngram", None, "is not one of none"),
        ("draft_model:3", None, "set speculative.draft_model"),
        (
            "ngram:4",
            SpeculativeSpec(acceptance_by_position=(0.8, 0.6, 0.4)),
            "acceptance_by_position ends before",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    text: str, given: SpeculativeSpec | None, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        settle_speculation(text, given)


def test_fewer_drafts_are_accepted_as_the_first_of_more() -> None:
    given = SpeculativeSpec(acceptance_by_position=(0.8, 0.6, 0.4))
    settled = settle_speculation("layers:2", given)
    assert settled is not None
    assert ("layers", (0.8, 0.6)) == (settled.method, settled.acceptance_by_position)
    assert pytest.approx(2.4) == settled.tokens_per_step


@pytest.mark.parametrize("ratio", [0.0, 0.7, 1.0])
def test_tokens_a_step_are_those_of_a_truncated_geometric(ratio: float) -> None:
    spec = SpeculativeSpec(num_draft_tokens=4, acceptance_ratio=ratio)
    assert pytest.approx(sum(ratio**place for place in range(5))) == spec.tokens_per_step
