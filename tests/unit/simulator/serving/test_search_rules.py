"""A search compares rules of engines."""

import json
import shlex
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from serving_fakes import RooflinePredictor

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
)
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec
from foretoken.simulator.launch.deployment import write_deployment
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import ServingSearch

_DCP = "decode_context_parallel=8"
_HALVES = "expert_exchange=deepep_low_latency+two_batch_tokens=2"


def _search(rules: tuple[str, ...], profile: str = "vllm-0.20", **changes: Any) -> Any:
    scenario = ServingScenario(
        model=find_model("deepseek-v3"),
        device="h200_sxm",
        engine=EngineSpec(profile=profile),
        workload=WorkloadSpec(
            num_requests=8, prefill=LengthSpec(mean=8000), decode=LengthSpec(mean=100)
        ),
    )
    space: dict[str, Any] = {"tp": (8,), "modes": ("aggregated",), "max_devices": 8, **changes}
    request = ServingSearchRequest(
        scenario=scenario,
        space=ServingSpace(
            max_num_seqs=(32,),
            max_num_batched_tokens=(2048,),
            rules=rules,
            **space,
        ),
        num_finalists=1,
    )
    return ServingSearch(cast("PredictorPort", RooflinePredictor())).run(request, InlineContext())


def _verdicts(report: ServingSearchReport) -> dict[str, str]:
    columns = report.candidates
    return dict(zip(columns.rules, columns.verdict, strict=True))


def test_every_rule_is_a_candidate_of_its_own() -> None:
    report = _search(("none", _DCP))
    assert {"none": "ok", _DCP: "ok"} == _verdicts(report)
    assert 2 == len(set(report.candidates.name))
    none, dcp = (
        float(np.asarray(report.candidates.kv_utilization_ratio)[index])
        for index in np.argsort(np.asarray(report.candidates.rules) != "none")
    )
    assert pytest.approx(8, rel=0.01) == none / dcp


def test_what_a_profile_cannot_start_is_out() -> None:
    assert {"none": "ok", _DCP: "engine"} == _verdicts(_search(("none", _DCP), "sglang-0.5"))
    assert {_HALVES: "engine"} == _verdicts(_search((_HALVES,)))


def test_contexts_are_split_in_pools_that_decode_for_others() -> None:
    pools = {"modes": ("aggregated", "disaggregated"), "max_devices": 16, "devices": ("b200",)}
    report = _search(("none", _DCP), "trtllm-1.3", **pools)
    columns = report.candidates
    rows = list(zip(columns.mode, columns.rules, columns.verdict, strict=True))
    assert ("aggregated", _DCP, "engine") in rows
    assert ("aggregated", "none", "ok") in rows
    assert {("disaggregated", "none", "ok"), ("disaggregated", _DCP, "ok")} <= set(rows)
    prefills = {name.partition(" + ")[0] for name in columns.name if " + " in name}
    assert not any(_DCP in name for name in prefills)


def test_the_best_is_simulated_and_started_with_its_rules(tmp_path: Path) -> None:
    report = _search((_HALVES,), tp=(1,), dp=(8,), ep=(8,))
    (finalist,) = report.finalists
    scenario = schema.decode(ServingScenario, json.loads(finalist.scenario_json), "finalist")
    write_deployment(scenario, tmp_path)
    words = shlex.split((tmp_path / "commands.sh").read_text(encoding="utf-8"), comments=True)
    assert {"--enable-dbo", "deepep_low_latency"} <= set(words)


@pytest.mark.parametrize("text", ["decode_context_parallel", "nothing=1", "block_size=x"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="rules"):
        _search((text,))
