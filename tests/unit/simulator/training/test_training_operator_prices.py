"""Prices of a step's operators."""

import dataclasses

import pytest
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain.lowering.graph import OperatorNode, Section
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.simulator.training.operator_prices import fetch_prices

_DIMS = {"m": 4096, "n": 8192, "k": 8192}
_FLOPS = 2 * 4096 * 8192 * 8192


def _price_us(device: str, operator: str, dims: dict[str, int]) -> float:
    node = OperatorNode(
        role=operator,
        group=find_operator(operator).group,
        section=Section.LAYER,
        operator=operator,
        dims=dims,
        dtype=DType.BF16,
    )
    scenario = dataclasses.replace(build_scenario(), device=device)
    return fetch_prices([node], scenario, RooflinePredictor()).find(node).latency_us


def test_products_keep_to_the_rate_that_a_device_sustains() -> None:
    assert _FLOPS / (0.48 * 2250e12) * 1e6 == pytest.approx(_price_us("b200", "gemm", _DIMS))


def test_devices_without_such_a_rate_keep_what_was_predicted() -> None:
    expected_us = pytest.approx(_FLOPS / 312e12 * 1e6, rel=0.01)
    assert expected_us == _price_us("a100_sxm_80", "gemm", _DIMS)


def test_what_is_no_product_has_no_such_rate() -> None:
    dims = {"num_tokens": 4096, "hidden": 8192}
    # Three values of two bytes each at 7.7 TB/s, and the launch.
    expected_us = pytest.approx(3 * 4096 * 8192 * 2 / 7.7e6 + 1.7)
    assert expected_us == _price_us("b200", "residual_add", dims)
