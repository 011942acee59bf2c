"""Steps under a model of whole steps: stretched by kind, bounded, and of what it was learned of."""

from dataclasses import replace

import numpy as np
import pytest
from serving_fakes import RooflinePredictor, build_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply
from foretoken.domain.measurements.step_model import StepKindModel, StepModel
from foretoken.domain.models.image import EncodedImages
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.latency_surfaces import fetch_surfaces, surface_spec
from foretoken.simulator.cost.step_scope import scope_of
from foretoken.simulator.cost.tables import StepShape, stage_us
from foretoken.simulator.serving.record import StepRecord
from foretoken.simulator.serving.step_cost import SurfaceCost

_SCENARIO = build_scenario(engine=EngineSpec(profile="plain"))
_WAITING = build_scenario(engine=EngineSpec(profile="plain", rules={"launch_us": "40"}))
_DECODE = StepShape(7, 7, 7, 7 * 811, 1300, 0)
_MIXED = StepShape(512, 6, 5, 5000, 2100, 1)
_PREFILL = StepShape(336, 0, 0, 0, 0, 1)
_LEARNED = {"decode": (1.5, 200.0), "mixed": (1.25, 0.0), "prefill": (0.8, 900.0)}


def _kind(kind: str) -> StepKindModel:
    ratio, constant_us = _LEARNED[kind]
    return StepKindModel(
        kind=kind,
        num_steps=40,
        ratio=ratio,
        constant_us=constant_us,
        low_ratio=0.9,
        high_ratio=1.2,
        measured_us=1.0,
        raw_us=1.0,
        corrected_us=1.0,
        raw_error_ratio=0.0,
        corrected_error_ratio=0.0,
        left_out_error_ratio=0.0,
    )


def _model(scenario: ServingScenario, *kinds: str) -> StepModel:
    scope = scope_of(surface_spec(scenario, 4000))
    return StepModel(**scope, source="a log", kinds=tuple(_kind(kind) for kind in kinds))


class _Corrected(RooflinePredictor):
    def __init__(self, steps: StepModel) -> None:
        super().__init__()
        self._steps = steps

    def predict(self, query: LatencyQuery) -> LatencyReply:
        return replace(super().predict(query), steps=self._steps)


def _cost(scenario: ServingScenario, steps: StepModel | None = None) -> SurfaceCost:
    predictor = RooflinePredictor() if steps is None else _Corrected(steps)
    return SurfaceCost(fetch_surfaces(surface_spec(scenario, 4000), predictor))


def _time_us(cost: SurfaceCost, shape: StepShape) -> float:
    tokens, context = np.array([shape.num_tokens - shape.num_decodes]), np.array([300])
    count = shape.num_prefills
    return stage_us(cost.tables, 0, shape, tokens[:count], context[:count])


def _record(*shapes: StepShape) -> StepRecord:
    zeros = np.zeros(len(shapes), dtype=np.int64)
    owner = np.array([i for i, shape in enumerate(shapes) if shape.num_prefills], dtype=np.int64)
    tokens = [shape.num_tokens - shape.num_decodes for shape in shapes if shape.num_prefills]
    others = ("scheduled_ns", "start_ns", "end_ns", "num_running", "num_waiting")
    return StepRecord(
        **{
            name: np.array([getattr(shape, name) for shape in shapes], dtype=np.int64)
            for name in StepShape._fields
        },
        **dict.fromkeys(others, zeros),
        num_used_blocks=zeros,
        num_preempted=zeros,
        prefill_step=owner,
        prefill_tokens=np.array(tokens, dtype=np.int64),
        prefill_context=np.full(len(owner), 300, dtype=np.int64),
        prefill_request=0 * owner,
    )


@pytest.mark.parametrize("scenario", [_SCENARIO, _WAITING], ids=["kernels", "launches"])
def test_each_kind_is_stretched_as_learned_where_looked_up_and_where_accounted(
    scenario: ServingScenario,
) -> None:
    raw, cost = _cost(scenario), _cost(scenario, _model(scenario, *_LEARNED))
    shapes = {"decode": _DECODE, "mixed": _MIXED, "prefill": _PREFILL}
    expected = {
        kind: ratio * _time_us(raw, shapes[kind]) + constant_us
        for kind, (ratio, constant_us) in _LEARNED.items()
    }
    assert expected == pytest.approx({kind: _time_us(cost, shapes[kind]) for kind in shapes})
    record = _record(*shapes.values())
    by_group = cost.breakdown(record)
    assert list(expected.values()) == pytest.approx(sum(by_group.values()))
    account = cost.account(record)
    total_s = sum(expected.values()) / 1e6
    assert (account.busy_s, account.low_s, account.high_s) == pytest.approx(
        (total_s, 0.9 * total_s, 1.2 * total_s)
    )


def test_prompts_with_decodes_and_alone_stand_in_for_each_other_and_decodes_for_none() -> None:
    raw, cost = _cost(_SCENARIO), _cost(_SCENARIO, _model(_SCENARIO, "mixed"))
    assert 1.25 * _time_us(raw, _PREFILL) == pytest.approx(_time_us(cost, _PREFILL))
    assert _time_us(raw, _DECODE) == _time_us(cost, _DECODE)


def test_of_something_else_it_is_refused() -> None:
    steps = _model(_SCENARIO, "decode")
    with pytest.raises(InvalidRequestError, match="was learned of layout 'default', not of 'tp=2'"):
        _cost(replace(_SCENARIO, layout=ParallelLayout(tp=2)), steps)
    with pytest.raises(InvalidRequestError, match="was learned of model 'other'"):
        _cost(_SCENARIO, replace(steps, model="other"))
    with pytest.raises(InvalidRequestError, match=r"layout\.pp: whole steps"):
        _cost(replace(_SCENARIO, layout=ParallelLayout(pp=2)), steps)


@pytest.mark.parametrize(
    ("kind", "key"),
    [("encoder", "images"), ("speech_encoder", "sound"), ("audio_encoder", "sound")],
)
def test_prompts_with_more_than_text_are_refused_by_what_they_have(kind: str, key: str) -> None:
    media = EncodedImages(num_images=1, num_patches=64, tokens_each=16, first_token=0, kind=kind)
    with pytest.raises(InvalidRequestError, match=rf"workload\.{key}: whole steps"):
        scope_of(replace(surface_spec(_SCENARIO, 4000), images=media))
