"""Weights in fewer bits than the activations, of which a device has no measurements."""

import numpy as np
import pytest
from predictor_fakes import MakePredictor, Train, base_us, columns_of, gemm_rows

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
)
from foretoken.domain.units import US_PER_S
from foretoken.predictor.service import PredictorService

_FEW, _MANY = {"m": 1, "n": 4096, "k": 4096}, {"m": 2048, "n": 4096, "k": 4096}
_INT4 = "quant=int4_wo"


def _ask(service: PredictorService, variant: str, device: str = "a30") -> LatencyColumns:
    columns = columns_of(_FEW, _MANY)
    table = OperatorTable(operator="gemm", dtype=DType.FP16, columns=columns, variant=variant)
    (found,) = service.predict(LatencyQuery(device=device, tables=(table,))).tables
    return found


def test_only_bytes_are_spared_where_whole_weights_were_measured(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Of one row they are nearly all that takes time, of many rows products are."""
    service = make_predictor(gemm_rows(lambda _: 1.6))
    train(service)
    whole, narrow = _ask(service, ""), _ask(service, _INT4)
    spared_bytes = 4096 * 4096 * 1.5
    spared_us = spared_bytes / find_device("a30").memory_bandwidth_bytes_per_s * US_PER_S
    expected_us = np.asarray(whole.latency_us) - [spared_us, 0.0]
    assert expected_us == pytest.approx(narrow.latency_us)
    assert [Provenance.EXTRAPOLATED.value] * 2 == narrow.provenance.tolist()
    spans = np.log(np.asarray(narrow.high_us) / narrow.low_us)
    assert spans[0] > spans[1] > np.log(whole.high_us[1] / whole.low_us[1])
    assert "weights of 4 bits are read in their place" in narrow.basis


def test_measured_narrow_weights_answer_for_themselves(
    make_predictor: MakePredictor, train: Train
) -> None:
    rows = gemm_rows(lambda _: 1.6) + gemm_rows(lambda _: 0.9, variant=_INT4)
    service = make_predictor(rows)
    train(service)
    expected_us = [0.9 * base_us("gemm", dims) for dims in (_FEW, _MANY)]
    assert expected_us == pytest.approx(_ask(service, _INT4).latency_us, rel=0.02)


def test_elsewhere_measured_narrow_weights_may_take_less_than_whole_ones_at_best(
    make_predictor: MakePredictor, train: Train
) -> None:
    engine = {"framework": "vllm", "framework_version": "0.19.0"}
    narrow = gemm_rows(lambda _: 0.4, variant=_INT4, **engine)
    service = make_predictor([*gemm_rows(lambda _: 1.6, **engine), *narrow])
    train(service)
    found = _ask(service, _INT4, "a100_sxm_80")
    expected_us = 0.4 * base_us("gemm", _FEW, "a100_sxm_80")
    assert expected_us == pytest.approx(found.latency_us[0], rel=0.02)
