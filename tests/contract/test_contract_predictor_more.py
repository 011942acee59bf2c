"""Versions, surfaces, explanations, plans and corrections behave alike, embedded and remote."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from contract_reach import Reach
from contract_rows import make_rows, make_run

from foretoken.catalog.service import CatalogService
from foretoken.client.services import PredictorClient
from foretoken.domain.errors import (
    InvalidRequestError,
    UnknownCorrectionError,
    UnknownModelVersionError,
    UnknownOperatorError,
)
from foretoken.domain.job import JobState
from foretoken.domain.measurements.correction import CorrectionRequest, Observation, ObservedCall
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorCall, OperatorTable
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import MeasurementBatch
from foretoken.domain.measurements.planning import CandidateAxis, PlanRequest
from foretoken.domain.measurements.surface import SurfaceAxis, SurfaceQuery
from foretoken.domain.ports import PredictorPort
from foretoken.predictor import servicer
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.service import PredictorService

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_AXES = (
    SurfaceAxis(dim="m", values=(1, 8, 100, 4096)),
    SurfaceAxis(dim="n", values=(2048, 4096)),
    SurfaceAxis(dim="k", values=(4096,)),
)


@contextmanager
def _trained(folder: Path, catalog: CatalogService, reach: Reach) -> Iterator[PredictorPort]:
    service = PredictorService(PredictorConfig(state_folder=str(folder / "p")), catalog)
    service.open()
    batch = MeasurementBatch(batch_index=0, rows=make_rows(_SIZES), is_last=True)
    list(catalog.record(make_run(), [batch]))
    found: PredictorPort = reach(service, servicer.register, PredictorClient.connect)
    _train(found, 0)
    yield found
    service.close()


@pytest.fixture
def port(tmp_path: Path, catalog: CatalogService, reach: Reach) -> Iterator[PredictorPort]:
    """A predictor that was trained once."""
    with _trained(tmp_path, catalog, reach) as port:
        yield port


@pytest.fixture(scope="module")
def asked(
    tmp_path_factory: pytest.TempPathFactory, shared_catalog: CatalogService, shared_reach: Reach
) -> Iterator[PredictorPort]:
    """The same for those who only ask."""
    with _trained(tmp_path_factory.mktemp("asked"), shared_catalog, shared_reach) as port:
        yield port


def _train(port: PredictorPort, seed: int) -> str:
    job = port.create_training(TrainRequest(seed=seed))
    assert JobState.SUCCEEDED is list(port.watch_job(job.job_id))[-1].state
    return port.get_training_report(job.job_id).model_version


def _gemm(m: int, **changes: object) -> LatencyQuery:
    table = OperatorTable(
        operator="gemm", dtype=DType.BF16, columns={"m": [m], "n": [4096], "k": [4096]}
    )
    return LatencyQuery(**{"device": "a30", "tables": (table,), **changes})


def test_an_estimate_names_the_nearest_measured_point_and_what_it_rests_on(
    asked: PredictorPort,
) -> None:
    columns = asked.predict(_gemm(9)).tables[0]
    nearest = {name: int(column[0]) for name, column in columns.nearest.items()}
    assert {"m": 8, "n": 4096, "k": 4096} == nearest
    assert 0 < columns.nearest_us[0]
    assert 0 < columns.nearest_octaves[0] < 1
    assert "10 points of gemm on a30" in columns.basis


def test_nothing_is_near_where_nothing_was_measured(asked: PredictorPort) -> None:
    table = OperatorTable(
        operator="rms_norm", dtype=DType.BF16, columns={"num_tokens": [8], "hidden": [64]}
    )
    columns = asked.predict(LatencyQuery(device="a30", tables=(table,))).tables[0]
    assert np.isinf(columns.nearest_octaves).all()
    assert {} == columns.nearest


def test_a_measured_point_can_be_had_as_it_was_measured(asked: PredictorPort) -> None:
    columns = asked.predict(_gemm(8, prefer_measured=True)).tables[0]
    assert columns.nearest_us[0] == columns.latency_us[0]


def test_a_version_is_pinned_and_activated(port: PredictorPort) -> None:
    first = port.list_models()[0].version
    second = _train(port, 1)
    assert first != second
    assert [second, first] == [
        port.predict(_gemm(9, model_version=version)).model_version for version in ("", first)
    ]
    assert port.activate_model(first[:8]).is_active
    assert first == port.predict(_gemm(9)).model_version


def test_an_unknown_version_is_not_found(asked: PredictorPort) -> None:
    with pytest.raises(UnknownModelVersionError):
        asked.predict(_gemm(9, model_version="none"))


def test_a_surface_holds_what_single_questions_answer(asked: PredictorPort) -> None:
    query = SurfaceQuery(device="a30", operator="gemm", dtype=DType.BF16, axes=_AXES)
    surface = asked.tabulate(query)
    alone = OperatorTable(
        operator="gemm", dtype=DType.BF16, columns={"m": [8], "n": [4096], "k": [4096]}
    )
    reply = asked.predict(LatencyQuery(device="a30", tables=(alone,)))
    assert (4 * 2, reply.model_version) == (
        len(surface.estimates.latency_us),
        surface.model_version,
    )
    # m = 8, the second of four; n = 4096, the second of two.
    assert reply.tables[0].latency_us[0] == surface.estimates.latency_us[3]


def test_a_surface_of_unknown_dimensions_is_refused(asked: PredictorPort) -> None:
    query = SurfaceQuery(device="a30", operator="gemm", dtype=DType.BF16, axes=_AXES[:2])
    with pytest.raises(InvalidRequestError, match="k"):
        asked.tabulate(query)


def test_an_explanation_is_of_the_estimate_given(asked: PredictorPort) -> None:
    explanation = asked.explain(_gemm(9))
    estimate = asked.predict(_gemm(9)).tables[0]
    assert float(estimate.latency_us[0]) == explanation.estimate.latency_us
    assert {"m": 8, "n": 4096, "k": 4096} == explanation.neighbours[0].dims
    assert 0 < explanation.efficiency_ratio
    assert 0 < explanation.memory_us
    assert explanation.tier


def test_more_than_one_call_is_not_explained(asked: PredictorPort) -> None:
    with pytest.raises(InvalidRequestError):
        asked.explain(replace(_gemm(9), tables=(_gemm(9).tables[0], _gemm(8).tables[0])))


def test_a_plan_keeps_to_its_candidates_and_its_budget(asked: PredictorPort) -> None:
    request = PlanRequest(
        device="a30",
        operator="gemm",
        axes=(
            CandidateAxis(dim="m", values=(8, 24, 3000)),
            CandidateAxis(dim="n", values=(1024, 4096)),
            CandidateAxis(dim="k", values=(4096,)),
        ),
        max_num_points=3,
    )
    plan = asked.plan_profile(request)
    # m = 8 with n = 4096 was measured.
    assert (6, 1, 3) == (plan.num_candidates, plan.num_measured, len(plan.points))
    assert plan.error_after_ratio <= plan.error_before_ratio
    assert plan.gpu_s <= request.budget_gpu_s
    assert {"m": 8, "n": 4096, "k": 4096} not in [dict(point.dims) for point in plan.points]


def test_a_plan_without_axes_keeps_collectives_inside_a_node(asked: PredictorPort) -> None:
    plan = asked.plan_profile(
        PlanRequest(device="a100_sxm_80", operator="all_reduce", topology="a100_perlmutter")
    )
    groups = {(point.dims["devices_per_node"], point.dims["num_nodes"]) for point in plan.points}
    assert {(2, 1), (4, 1)} == groups


def test_a_plan_for_an_unknown_operator_is_refused(asked: PredictorPort) -> None:
    with pytest.raises(UnknownOperatorError):
        asked.plan_profile(PlanRequest(device="a30", operator="gem"))


def test_a_correction_is_learned_kept_and_applied(port: PredictorPort) -> None:
    raw = port.predict(_gemm(8)).tables[0]
    call = OperatorCall(operator="gemm", dtype=DType.BF16, dims={"m": 8, "n": 4096, "k": 4096})
    observed = Observation(
        name="step",
        observed_us=float(raw.latency_us[0]) * 10 * 1.25,
        calls=(ObservedCall(call=call, count=10.0),),
    )
    request = CorrectionRequest(name="mine", device="a30", observations=(observed,))
    correction = port.create_correction(request)
    assert pytest.approx(1.25) == correction.factors[""]
    corrected = port.predict(_gemm(8, correction="mine")).tables[0]
    assert pytest.approx(1.25) == corrected.correction_factor
    assert pytest.approx(raw.latency_us[0]) == corrected.raw_latency_us[0]
    assert ["mine"] == [kept.name for kept in port.list_corrections()]


def test_an_unknown_correction_is_not_found(asked: PredictorPort) -> None:
    with pytest.raises(UnknownCorrectionError):
        asked.predict(_gemm(8, correction="none"))
