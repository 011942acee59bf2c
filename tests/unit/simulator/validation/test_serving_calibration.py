"""What a run tells of operators' times is what was put into it."""

from dataclasses import replace

import numpy as np
import pytest
from served_runs import StepCost, serve, usual_cost

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.correction import (
    CorrectedObservation,
    Correction,
    CorrectionRequest,
)
from foretoken.domain.measurements.estimate import LatencyColumns, LatencyQuery, LatencyReply
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.serving_run import ServingRun
from foretoken.domain.results.report import ServingReport
from foretoken.simulator.validation.measured_run import scenario_of_run
from foretoken.simulator.validation.serving_calibration import calibrate_serving
from foretoken.simulator.validation.serving_page import write_calibrated

_SERVER = ServingScenario(model="llama-3.1-8b", device="h100_sxm")
_CALL_US = 10.0
_HOST_RATIO = 0.1


class _Predictor:
    """Every call takes the same; a correction is the geometric mean of what was observed."""

    def predict(self, query: LatencyQuery) -> LatencyReply:
        times = np.array([_CALL_US])
        columns = LatencyColumns(
            latency_us=times, low_us=times, high_us=times, provenance=np.array([0])
        )
        return LatencyReply(tables=tuple(columns for _ in query.tables), model_version="")

    def create_correction(self, request: CorrectionRequest) -> Correction:
        raw_us = [sum(one.count for one in item.calls) * _CALL_US for item in request.observations]
        ratios = [
            item.observed_us / raw for item, raw in zip(request.observations, raw_us, strict=True)
        ]
        return Correction(
            name=request.name,
            device=request.device,
            created_at="",
            model_version="",
            factors={"": float(np.exp(np.mean(np.log(ratios))))},
            observations=tuple(
                CorrectedObservation(
                    name=item.name, observed_us=item.observed_us, raw_us=raw, corrected_us=raw
                )
                for item, raw in zip(request.observations, raw_us, strict=True)
            ),
        )


def _report(cost: StepCost, frontend_ms: float = 0.0) -> ServingReport:
    groups = {"gemm": 1 - _HOST_RATIO, "host": _HOST_RATIO}
    return replace(serve(cost, frontend_ms=frontend_ms).as_report(), step_time_s_by_group=groups)


def _measured(frontend_ms: float = 0.0) -> ServingRun:
    return serve(frontend_ms=frontend_ms).as_run(has_schedule=True)


def _slow(batch: int, context: int, prompt: int) -> float:
    return 1.25 * usual_cost(batch, context, prompt)


def test_the_host_is_taken_as_given_and_the_rest_is_the_operators() -> None:
    """Steps of 1.25 are simulated where 1 was measured: operators took 0.875 of 1.125."""
    run = _measured()
    simulated = {"": _report(_slow), "mine": _report(usual_cost)}
    found = calibrate_serving(
        run,
        scenario_of_run(_SERVER, run),
        "mine",
        lambda asked: simulated[asked.correction],
        _Predictor(),
    )
    assert found.correction.factors[""] == pytest.approx(0.875 / 1.125, rel=0.03)
    assert ("mine", 0.0) == (found.scenario.correction, found.frontend_ms)
    raw, calibrated = (one.metrics[1].error_ratio("mean") for one in (found.raw, found.calibrated))
    assert raw > 0.25 > calibrated == pytest.approx(0.0, abs=0.01)
    assert "correction: mine\n" == write_calibrated(found)


def test_what_is_missing_before_the_first_token_is_the_front_end() -> None:
    run = _measured(frontend_ms=7.0)

    def simulate(asked: ServingScenario) -> ServingReport:
        return _report(usual_cost, asked.resolve_engine().frontend_ms)

    found = calibrate_serving(run, scenario_of_run(_SERVER, run), "mine", simulate, _Predictor())
    usual_ms = _SERVER.resolve_engine().frontend_ms
    assert found.frontend_ms == pytest.approx(7.0 - usual_ms, abs=0.01)
    assert "frontend_ms: 7" in write_calibrated(found)


def test_what_tells_nothing_of_steps_is_refused() -> None:
    run = _measured()
    with pytest.raises(InvalidRequestError, match="leave it out"):
        calibrate_serving(
            run,
            replace(scenario_of_run(_SERVER, run), correction="other"),
            "mine",
            lambda _: _report(usual_cost),
            _Predictor(),
        )
    alone = replace(
        run, requests=tuple(replace(r, num_decode_tokens=1, chunk_s=()) for r in run.requests)
    )
    columns = _report(usual_cost).requests
    single = replace(
        _report(usual_cost),
        requests=replace(
            columns,
            num_decode_tokens=np.ones_like(columns.num_decode_tokens),
            finished_s=columns.first_token_s,
        ),
    )
    alone = replace(
        alone,
        requests=tuple(replace(r, last_token_s=r.first_token_s) for r in alone.requests),
    )
    with pytest.raises(InvalidRequestError, match="no answer has a second token"):
        calibrate_serving(
            alone, scenario_of_run(_SERVER, alone), "mine", lambda _: single, _Predictor()
        )
