"""Prices of a step's operators."""

import dataclasses
from collections.abc import Mapping

import pytest
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.simulator.training.operator_prices import fetch_prices

_DIMS = {"m": 4096, "n": 8192, "k": 8192}
_FLOPS = 2 * 4096 * 8192 * 8192


def _price_us(
    device: str,
    operator: str,
    dims: dict[str, int],
    predictor: RooflinePredictor | None = None,
    power_limit_w: float = 0.0,
    rules: Mapping[str, str] | None = None,
) -> float:
    node = OperatorNode(
        role=operator,
        group=find_operator(operator).group,
        section=Section.LAYER,
        operator=operator,
        dims=dims,
        dtype=DType.BF16,
    )
    scenario = dataclasses.replace(
        build_scenario(),
        device=device,
        power_limit_w=power_limit_w,
        trainer=TrainerSpec(rules=rules or {}),
    )
    return fetch_prices([node], scenario, predictor or RooflinePredictor()).find(node).latency_us


@pytest.mark.parametrize("power_limit_w", [0.0, 500.0])
def test_steps_take_what_lasts_at_the_limit_of_the_devices(power_limit_w: float) -> None:
    predictor = RooflinePredictor()
    _price_us("h100_sxm", "gemm", _DIMS, predictor, power_limit_w)
    (query,) = predictor.queries
    assert (True, power_limit_w) == (query.sustained, query.power_limit_w)


def test_a_trainer_that_power_does_not_slow_takes_what_bursts_take() -> None:
    predictor = RooflinePredictor()
    _price_us("h100_sxm", "gemm", _DIMS, predictor, rules={"slowed_by_power": "false"})
    (query,) = predictor.queries
    assert not query.sustained


@pytest.mark.parametrize(("device", "peak"), [("a100_sxm_80", 312e12), ("b200", 2250e12)])
def test_products_cost_what_was_predicted(device: str, peak: float) -> None:
    expected_us = pytest.approx(_FLOPS / peak * 1e6, rel=0.01)
    assert expected_us == _price_us(device, "gemm", _DIMS)
