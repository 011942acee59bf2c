"""Which of the measured series answers a question."""

import numpy as np
import pytest

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.model_set import ModelSet, Wanted
from foretoken.predictor.roofline import Target
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.trainer import train_series

_MOE = find_operator("moe_experts")
_TARGET = Target(device=find_device("a100_sxm_80"), dtype=DType.BF16, phase=Phase.FORWARD)


def _set_of(*variants: str) -> ModelSet:
    models = {}
    for variant in variants:
        key = SeriesKey(
            "moe_experts", "a100_sxm_80", "", "bf16", "forward", "vllm 1", variant=variant
        )
        points = np.array([(m, 2, 8, 8, 512, 512) for m in range(16, 116)])
        latency_us = 10.0 + 0.1 * np.arange(100.0)
        series = Series(key=key, points=points, latency_us=latency_us)
        models[key] = train_series(series, PredictorConfig(state_folder=""), 0)
    return ModelSet(series=models)


@pytest.mark.parametrize(
    ("measured", "wanted", "answering"),
    [
        (("routing=balanced", ""), "routing=balanced", "routing=balanced"),
        (("routing=power_law_1.2", ""), "routing=balanced", ""),
        (("routing=power_law_1.2",), "routing=balanced", "routing=power_law_1.2"),
        (("routing=power_law_1.2",), "", "routing=power_law_1.2"),
        (("quant=fp8;routing=balanced", ""), "routing=balanced", ""),
        (("quant=fp8;routing=balanced",), "quant=fp8", "quant=fp8;routing=balanced"),
        (
            ("", "quant=int4_wo;routing=balanced", "quant=int4_wo;routing=power_law_1.2"),
            "quant=nvfp4_wo;routing=power_law_1.2",
            "quant=int4_wo;routing=power_law_1.2",
        ),
    ],
)
def test_another_routing_of_the_same_kernels_answers_in_doubt(
    measured: tuple[str, ...], wanted: str, answering: str
) -> None:
    choice = _set_of(*measured).choose(_MOE, _TARGET, Wanted(variant=wanted))
    assert choice is not None
    assert answering == choice.model.series.key.variant
    assert (answering != wanted) == choice.is_other_code


def test_other_weights_do_not_answer() -> None:
    assert _set_of("quant=fp8").choose(_MOE, _TARGET, Wanted(variant="routing=balanced")) is None


@pytest.mark.parametrize(
    ("measured", "answering"),
    [
        (("mask=none",), "mask=none"),
        (("step=unknown",), None),
        (("form=eager",), None),
        (("mask=none", ""), ""),
    ],
)
def test_how_a_point_was_sampled_stands_in_for_the_plain_case(
    measured: tuple[str, ...], answering: str | None
) -> None:
    choice = _set_of(*measured).choose(_MOE, _TARGET, Wanted())
    assert answering == (choice.model.series.key.variant if choice else None)
