"""What records of steps tell is what was put into them; what tells nothing is refused."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.measurements.correction import Correction, CorrectionRequest
from foretoken.domain.measurements.estimate import LatencyColumns, LatencyQuery, LatencyReply
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces, surface_spec
from foretoken.simulator.serving.step_cost import SurfaceCost
from foretoken.simulator.validation.measured_steps import EngineStep, StepRun
from foretoken.simulator.validation.step_calibration import calibrate_steps, record_steps
from foretoken.simulator.validation.step_calibration_page import step_calibration_section

_SERVER = ServingScenario(
    model="llama-3.1-8b", device="h100_sxm", engine=EngineSpec(profile="vllm-0.19")
)


class _Predictor:
    """A call takes a µs for each thousand of what its dimensions multiply to; keeps corrections."""

    def __init__(self) -> None:
        self.kept: list[CorrectionRequest] = []

    def predict(self, query: LatencyQuery) -> LatencyReply:
        def answer(columns: Sequence[Sequence[int]]) -> LatencyColumns:
            # The largest dimension stands for the work, and 20 µs for what every kernel takes.
            times = 20.0 + np.max(np.asarray(columns, dtype=np.float64), axis=0) / 1e3
            return LatencyColumns(
                latency_us=times,
                low_us=times,
                high_us=times,
                provenance=np.zeros(len(times), dtype=np.int8),
            )

        tables = tuple(answer(list(table.columns.values())) for table in query.tables)
        return LatencyReply(model_version="made up", tables=tables)

    def list_models(self) -> Sequence[ModelVersion]:
        return ()

    def create_correction(self, request: CorrectionRequest) -> Correction:
        self.kept.append(request)
        return Correction(
            name=request.name,
            device=request.device,
            created_at="",
            model_version="",
            steps=request.steps,
        )


def _shapes(num_decode: int, num_mixed: int) -> list[EngineStep]:
    draw = np.random.default_rng(3)
    found = []
    for place in range(num_decode + num_mixed):
        batch, context = int(draw.integers(1, 200)), int(draw.integers(100, 4000))
        prompt = 0 if place < num_decode else int(draw.integers(1, 1800))
        found.append(
            EngineStep(
                duration_s=1.0,
                num_prefills=int(prompt > 0),
                prefill_tokens=prompt,
                num_decodes=batch,
                decode_kv_tokens=batch * context,
                decode_kv_tokens_max=context,
            )
        )
    order = draw.permutation(len(found))
    return [found[place] for place in order]


def _run(
    shapes: Sequence[EngineStep], ratio: float, constant_us: float, noise: float = 0.0
) -> StepRun:
    """Steps that take what they are estimated to, stretched, and some noise."""
    cost = SurfaceCost(fetch_surfaces(surface_spec(_SERVER, 8192), _Predictor()))
    raw_us = np.sum(list(cost.breakdown(record_steps(shapes)).values()), axis=0)
    factors = np.exp(np.random.default_rng(5).normal(0.0, noise, len(shapes)))
    times_s = (ratio * raw_us + constant_us) * factors / 1e6
    steps = tuple(
        replace(step, duration_s=float(time_s))
        for step, time_s in zip(shapes, times_s, strict=True)
    )
    return StepRun(source="a log", steps=steps)


def test_ratio_and_constant_are_found_with_bounds_that_hold_nine_in_ten() -> None:
    predictor = _Predictor()
    run = _run(_shapes(400, 0), ratio=1.4, constant_us=3000.0, noise=0.05)
    found = calibrate_steps(run, _SERVER, "mine", predictor)
    (decode,) = found.steps.kinds
    assert (decode.ratio, decode.constant_us) == (
        pytest.approx(1.4, rel=0.1),
        pytest.approx(3000.0, rel=0.25),
    )
    assert decode.raw_error_ratio > 0.3
    assert decode.left_out_error_ratio < 0.06
    assert (0.9, 1.1) == (
        pytest.approx(decode.low_ratio, abs=0.03),
        pytest.approx(decode.high_ratio, abs=0.03),
    )
    assert found.steps == predictor.kept[0].steps
    assert ("llama-3.1-8b", "vllm 0.19", "", "mine") == (
        found.steps.model,
        found.steps.engine,
        found.steps.layout,
        found.scenario.correction,
    )
    section = step_calibration_section(found)
    assert "correction: mine\n" == section.listing
    assert "0 mixed steps are fewer than 20: they stay as estimated" in " ".join(found.notes)


def test_steps_as_estimated_are_left_alone_and_outliers_move_nothing() -> None:
    run = _run(_shapes(100, 60), ratio=1.0, constant_us=0.0, noise=0.02)
    found = calibrate_steps(run, _SERVER, "mine", _Predictor())
    assert {("decode", 1.0, 0.0), ("mixed", 1.0, 0.0)} == {
        (each.kind, each.ratio, each.constant_us) for each in found.steps.kinds
    }
    slow = _run(_shapes(100, 0), ratio=2.0, constant_us=0.0)
    steps = [
        replace(step, duration_s=step.duration_s * (10 if place % 20 == 7 else 1))
        for place, step in enumerate(slow.steps)
    ]
    (decode,) = calibrate_steps(
        replace(slow, steps=tuple(steps)), _SERVER, "mine", _Predictor()
    ).steps.kinds
    assert 2.0 == pytest.approx(decode.ratio, rel=0.01)


def test_what_is_not_of_the_scenario_or_too_little_is_refused() -> None:
    shapes = _shapes(30, 0)
    refused = {
        "at least 20 steps of a kind; has 12 decode": (_run(shapes[:12], 1.5, 0.0), _SERVER),
        "take 9 times what they are estimated": (_run(shapes, 9.0, 0.0), _SERVER),
        "off whatever is learned": (_run(shapes, 1.0, 0.0, noise=1.5), _SERVER),
        "max_num_seqs: is 16, and a recorded step has": (
            _run(shapes, 1.0, 0.0),
            replace(_SERVER, engine=replace(_SERVER.engine, max_num_seqs=16)),
        ),
        "is to be learned": (_run(shapes, 1.0, 0.0), replace(_SERVER, correction="other")),
    }
    for reason, (run, server) in refused.items():
        with pytest.raises(InvalidRequestError, match=reason):
            calibrate_steps(run, server, "mine", _Predictor())
