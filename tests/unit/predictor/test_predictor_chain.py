"""Chains that eager PyTorch runs in place of one kernel, where none was measured."""

import numpy as np
import pytest
from predictor_fakes import MakePredictor, Rows, Train, base_us, columns_of, row_of

from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import EAGER_VARIANT
from foretoken.predictor.service import PredictorService

_POINTS = [
    {"num_tokens": num_tokens, "hidden": hidden}
    for num_tokens in (256, 512, 1024, 2048, 4096, 8192)
    for hidden in (1024, 2048, 4096, 8192)
]
_CALLS = {
    "rms_norm": {"num_tokens": 2048, "hidden": 4096},
    "rope": {"num_tokens": 2048, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
}


def _rows(operator: str, **other: str) -> Rows:
    times_us = [4 * base_us(operator, point, "a30") for point in _POINTS]
    return [
        row_of(operator, point, latency_us, device="a30", **other)
        for point, latency_us in zip(_POINTS, times_us, strict=True)
    ]


def _ask(
    service: PredictorService, operator: str, phase: Phase = Phase.FORWARD, variant: str = ""
) -> LatencyColumns:
    columns = columns_of(_CALLS[operator])
    table = OperatorTable(
        operator=operator, dtype=DType.FP16, phase=phase, variant=variant, columns=columns
    )
    return service.predict(LatencyQuery(device="a30", tables=(table,))).tables[0]


@pytest.mark.parametrize("operator", ["rms_norm", "rope"])
@pytest.mark.parametrize("measured", ["residual_add", "rms_norm"])
def test_a_chain_nobody_measured_takes_so_many_times_as_long_as_its_kernel(
    make_predictor: MakePredictor, train: Train, operator: str, measured: str
) -> None:
    service = make_predictor(_rows(measured))
    train(service)
    ratios = find_operator(operator).chain_ratios
    for phase, ratio in zip((Phase.FORWARD, Phase.BACKWARD), ratios, strict=True):
        kernel = _ask(service, operator, phase)
        chain = _ask(service, operator, phase, EAGER_VARIANT)
        np.testing.assert_allclose(chain.latency_us, ratio * kernel.latency_us, rtol=1e-3)
        assert chain.low_us < chain.latency_us < chain.high_us
        assert "a chain of kernels takes" in chain.basis


def test_a_chain_that_was_measured_takes_what_it_took(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(_rows("rms_norm", variant=EAGER_VARIANT))
    train(service)
    chain = _ask(service, "rms_norm", variant=EAGER_VARIANT)
    expected_us = 4 * base_us("rms_norm", _CALLS["rms_norm"], "a30")
    np.testing.assert_allclose(chain.latency_us, expected_us, rtol=0.02)
