"""Operators nobody measured: what takes as long answers, and a backward pass by its parts."""

from collections.abc import Mapping

import numpy as np
import pytest
from predictor_fakes import MakePredictor, Rows, Train, base_us, columns_of, gemm_rows, row_of

from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.predictor.service import PredictorService

_POINTS = [
    {"num_tokens": num_tokens, "hidden": hidden}
    for num_tokens in (256, 512, 1024, 2048, 4096, 8192)
    for hidden in (1024, 2048, 4096, 8192)
]


def _addition_rows() -> Rows:
    return [row_of("residual_add", point, _addition_us(point)) for point in _POINTS]


def _norm_rows(device: str, **other: str) -> Rows:
    """Return norms of four times their base latency."""
    times_us = [4 * base_us("rms_norm", point, device) for point in _POINTS]
    return [
        row_of("rms_norm", point, latency_us, device=device, **other)
        for point, latency_us in zip(_POINTS, times_us, strict=True)
    ]


def _addition_us(dims: Mapping[str, int]) -> float:
    return 5.0 + dims["num_tokens"] * dims["hidden"] * 6 / 800e3


def _ask(
    service: PredictorService,
    operator: str,
    dims: Mapping[str, int],
    phase: Phase = Phase.FORWARD,
) -> LatencyColumns:
    table = OperatorTable(
        operator=operator, dtype=DType.FP16, phase=phase, columns=columns_of(dims)
    )
    return service.predict(LatencyQuery(device="a30", tables=(table,))).tables[0]


def test_a_streaming_operator_takes_as_long_as_a_sum_that_moves_as_much(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(_addition_rows())
    train(service)
    sum_of_two = {"num_tokens": 2048, "hidden": 4096}
    expected = _ask(service, "residual_add", sum_of_two)
    # Two elements moved in place of three.
    silu = _ask(service, "silu", {"num_tokens": 3072, "intermediate": 4096})
    total = _ask(service, "gradient_accumulation", {"num_params": 2048 * 4096})
    for found in (silu, total):
        assert [Provenance.TRANSFERRED] == [Provenance(value) for value in found.provenance]
        np.testing.assert_allclose(found.latency_us, expected.latency_us, rtol=0.02)
        assert found.basis.startswith("residual_add, which takes about as long: ")


def test_columns_of_many_calls_are_answered_at_once(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(_addition_rows())
    train(service)
    sizes = [{"num_params": 2**power} for power in (20, 22, 24)]
    table = OperatorTable(operator="cast", dtype=DType.FP16, columns=columns_of(*sizes))
    at_once = service.predict(LatencyQuery(device="a30", tables=(table,))).tables[0]
    one_by_one = [float(_ask(service, "cast", size).latency_us[0]) for size in sizes]
    np.testing.assert_allclose(at_once.latency_us, one_by_one)


def test_nothing_stands_in_where_it_was_not_measured_either(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(gemm_rows())
    train(service)
    found = _ask(service, "silu", {"num_tokens": 3072, "intermediate": 4096})
    assert [Provenance.ANALYTICAL] == [Provenance(value) for value in found.provenance]
    assert "takes about as long" not in found.basis


def test_the_operator_itself_on_another_device_says_more_than_what_stands_in(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor([*_addition_rows(), *_norm_rows("h100_sxm")])
    train(service)
    point = {"num_tokens": 2048, "hidden": 4096}
    found = _ask(service, "rms_norm", point)
    assert "rms_norm on 1 other GPU" == found.basis
    np.testing.assert_allclose(found.latency_us, 4 * base_us("rms_norm", point), rtol=0.05)


@pytest.mark.parametrize("device", ["a30", "h100_sxm"])
def test_a_chain_of_kernels_says_nothing_of_the_one_that_does_the_same(
    make_predictor: MakePredictor, train: Train, device: str
) -> None:
    service = make_predictor([*_addition_rows(), *_norm_rows(device, variant="form=eager")])
    train(service)
    found = _ask(service, "rms_norm", {"num_tokens": 2048, "hidden": 4096})
    assert found.basis.startswith("residual_add, which takes about as long: ")


def test_a_backward_gemm_nobody_measured_is_its_two_products(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(gemm_rows())
    train(service)
    m, n, k = 512, 2048, 4096
    found = _ask(service, "gemm", {"m": m, "n": n, "k": k}, Phase.BACKWARD)
    parts = [{"m": m, "n": k, "k": n}, {"m": n, "n": k, "k": m}]
    expected = sum(_ask(service, "gemm", part).latency_us for part in parts)
    np.testing.assert_allclose(found.latency_us, expected)
    assert [Provenance.EXTRAPOLATED] == [Provenance(value) for value in found.provenance]
    assert found.basis.startswith("its forward calls: ")


def test_a_backward_gemm_measured_on_zeros_is_not_what_is_asked_for(
    make_predictor: MakePredictor, train: Train
) -> None:
    zeros = gemm_rows(lambda _: 0.1, phase="backward", variant="gradients=zero")
    service = make_predictor([*gemm_rows(), *zeros])
    train(service)
    found = _ask(service, "gemm", {"m": 512, "n": 4096, "k": 4096}, Phase.BACKWARD)
    assert found.basis.startswith("its forward calls: ")
