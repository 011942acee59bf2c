"""Searches that try encoders of images apart from engines."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from serving_fakes import RooflinePredictor, build_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.models.architecture import find_model
from foretoken.domain.models.image import find_encoder
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.search import (
    ServingSearchReport,
    ServingSearchRequest,
    ServingSpace,
)
from foretoken.domain.requests.workload import ImageSpec, LengthSpec, WorkloadSpec
from foretoken.simulator.search.context import InlineContext
from foretoken.simulator.search.serving.search import (
    ServingSearch,
    candidate_scenario,
    count_points,
)

_EYES = find_encoder(find_model("qwen3-vl-235b-a22b"))
_MODEL = replace(find_model("qwen2-7b"), extras=(_EYES,) if _EYES else ())


def _request(*encoders: int, profile: str = "vllm-0.31", **changes: object) -> ServingSearchRequest:
    space = {"max_devices": 4, "tp": (1,), "max_num_seqs": (16,), "modes": ("aggregated",)}
    images = ImageSpec(num_images=changes.pop("num_images", 2)) if encoders else None  # type: ignore[arg-type]
    workload = WorkloadSpec(
        num_requests=8, prefill=LengthSpec(mean=3000), decode=LengthSpec(mean=100), images=images
    )
    target_rps = cast("float", changes.pop("target_rps", 0.0))
    return ServingSearchRequest(
        scenario=build_scenario(
            model=_MODEL,
            device="h100_sxm",
            engine=EngineSpec(
                profile=profile,
                max_num_batched_tokens=8192,
                # Called in process.
                rules={"frontend_ms": "0", "frontend_us_per_token": "0"},
            ),
            workload=workload,
        ),
        space=ServingSpace(**{**space, "encoders": encoders, **changes}),  # type: ignore[arg-type]
        num_finalists=0,
        target_rps=target_rps,
    )


def _search() -> ServingSearch:
    return ServingSearch(cast("PredictorPort", RooflinePredictor()))


def _run(request: ServingSearchRequest) -> ServingSearchReport:
    return _search().run(request, InlineContext())


def test_encoders_leave_engines_their_devices() -> None:
    report = _run(_request(0, 1, 2))
    table = report.candidates
    found = dict(zip(table.encoders.tolist(), table.replicas.tolist(), strict=True))
    assert {0: 4, 1: 3, 2: 2} == found
    assert [4, 4, 4] == table.num_devices.tolist()
    assert "1 x encoder + 3 x tp1 b16" in table.name
    assert count_points(_request(0, 1, 2)) == report.num_points == 3


def test_engines_answer_sooner_that_are_sent_embeddings() -> None:
    table = _run(_request(0, 1)).candidates
    together, apart = (int(np.flatnonzero(table.encoders == count)[0]) for count in (0, 1))
    assert table.tpot_ms[apart] < 0.9 * table.tpot_ms[together]


@pytest.mark.parametrize(("mode", "ratio"), [("aggregated", 0.2), ("disaggregated", 0.05)])
def test_the_closed_form_is_that_of_the_simulation(mode: str, ratio: float) -> None:
    """Requests of aggregated engines come back together, and wait longer for an encoder."""
    request = _request(1, modes=(mode,), max_num_seqs=(8,))
    report = _run(replace(request, num_finalists=1))
    (finalist,) = report.finalists
    row, table, simulated = finalist.candidate, report.candidates, finalist.report
    assert 1 == table.encoders[row]
    assert table.ttft_ms[row] == pytest.approx(simulated.ttft_ms.mean, rel=ratio)
    assert table.tpot_ms[row] == pytest.approx(simulated.tpot_ms.mean, rel=0.02)
    rate_rps = simulated.request_throughput_rps
    assert table.request_throughput_rps[row] == pytest.approx(rate_rps, rel=0.02)
    scenario = candidate_scenario(request, row, _search())
    assert scenario.cluster is not None
    encoders = scenario.cluster.encoders
    assert encoders is not None
    assert (1, "h100_sxm") == (encoders.num_replicas, encoders.device)
    assert scenario.num_devices == table.num_devices[row]


def test_encoders_that_cannot_keep_up_are_ruled_out() -> None:
    table = _run(_request(1, target_rps=1000.0, max_devices=64)).candidates
    assert {"encoders", "devices"} >= set(table.verdict.tolist())
    assert any("1 encoders carry" in str(reason) for reason in table.reason)


def test_an_engine_that_cannot_is_not_proposed() -> None:
    table = _run(_request(0, 1, profile="trtllm-1.0", max_num_batched_tokens=(8192,))).candidates
    assert {"ok"} == set(table.verdict[table.encoders == 0].tolist())
    assert {"engine"} == set(table.verdict[table.encoders == 1].tolist())


def test_what_no_files_are_written_for_is_not_proposed_where_they_are_wanted() -> None:
    table = _run(_request(0, 1, server="vllm")).candidates
    apart = table.encoders == 1
    assert {"engine"} == set(table.verdict[apart].tolist())
    assert "no files are written for vllm" in table.reason[apart][0]
    table = _run(_request(0, 1, server="sglang", profile="sglang-0.5.20")).candidates
    assert {"ok"} == set(table.verdict.tolist())


def test_encoders_need_images_and_devices_besides_their_own() -> None:
    text = _request()
    with pytest.raises(InvalidRequestError, match="no images to encode"):
        _run(replace(text, space=replace(text.space, encoders=(0, 1))))
    with pytest.raises(InvalidRequestError, match="leave no device of 4"):
        _run(_request(4))
    assert [0] == sorted(set(_run(text).candidates.encoders.tolist()))
