"""Bursts and what lasts: rows timed for long are learned as bursts, and asked for as they last."""

from typing import Any

import numpy as np
import pytest
from predictor_fakes import MakePredictor, Rows, Train, base_us, columns_of, row_of

from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
)
from foretoken.predictor.service import PredictorService

_LARGE = {"m": 8192, "n": 8192, "k": 8192}
_SMALL = {"m": 16, "n": 1024, "k": 1024}


def _rows(device: str, **facts: float | str) -> Rows:
    """Return GEMMs that all take 1.3 times their limit: large ones reach 0.77 of the peak."""
    rows: list[dict[str, Any]] = []
    for m in (16, 64, 256, 1024, 4096, 8192):
        for n in (1024, 4096, 8192):
            for k in (1024, 4096, 8192):
                dims = {"m": m, "n": n, "k": k}
                latency_us = 1.3 * base_us("gemm", dims, device=device)
                row = row_of("gemm", dims, latency_us, device=device)
                rows.append({**row, **facts})
    return rows


def _ask(
    service: PredictorService, dims: dict[str, int], device: str = "h200_sxm", **how: Any
) -> LatencyColumns:
    table = OperatorTable(operator="gemm", dtype=DType.FP16, columns=columns_of(dims))
    query = LatencyQuery(device=device, tables=(table,), prefer_measured=True, **how)
    return service.predict(query).tables[0]


@pytest.fixture
def bursts(make_predictor: MakePredictor, train: Train) -> PredictorService:
    service = make_predictor(_rows("h200_sxm"))
    train(service)
    return service


def test_what_lasts_is_slowed_where_it_takes_much_power(bursts: PredictorService) -> None:
    burst, lasting = _ask(bursts, _LARGE), _ask(bursts, _LARGE, sustained=True)
    assert 1.1 < lasting.latency_us[0] / burst.latency_us[0] < 1.3
    assert lasting.low_us[0] < lasting.latency_us[0] < lasting.high_us[0]
    assert lasting.high_us[0] / lasting.low_us[0] > burst.high_us[0] / burst.low_us[0]
    assert (Provenance.MEASURED.value, Provenance.INTERPOLATED.value) == (
        burst.provenance[0],
        lasting.provenance[0],
    )
    assert "as fast as power allows for long" in lasting.basis
    small, lasting = _ask(bursts, _SMALL), _ask(bursts, _SMALL, sustained=True)
    assert small.latency_us == lasting.latency_us
    assert Provenance.MEASURED.value == lasting.provenance[0]


def test_a_lower_limit_of_power_slows_more(bursts: PredictorService) -> None:
    found = [
        float(_ask(bursts, _LARGE, sustained=True, power_limit_w=watts).latency_us[0])
        for watts in (0.0, 700.0, 500.0, 300.0)
    ]
    assert found[0] == found[1] < found[2] < found[3]
    assert _ask(bursts, _LARGE, power_limit_w=300.0).latency_us[0] < found[0]


def test_what_was_timed_for_long_is_told_as_it_was_timed_and_as_a_burst(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Rows with a mean power lasted about a second: of what lasts they tell themselves."""
    service = make_predictor(_rows("h200_sxm", power_w=690.0))
    train(service)
    measured_us = 1.3 * base_us("gemm", _LARGE, device="h200_sxm")
    lasting, burst = _ask(service, _LARGE, sustained=True), _ask(service, _LARGE)
    assert pytest.approx(measured_us, rel=1e-3) == lasting.latency_us[0]
    assert burst.latency_us[0] < 0.9 * measured_us


def test_bursts_whose_table_has_a_mean_power_are_bursts(
    make_predictor: MakePredictor, train: Train
) -> None:
    found = {}
    for version in ("1.3.0rc20", "1.3.0rc15"):
        software = {"framework": "trtllm", "framework_version": version}
        service = make_predictor(_rows("b200", power_w=990.0, **software))
        train(service)
        found[version] = _ask(service, _LARGE, "b200").latency_us[0]
    measured_us = 1.3 * base_us("gemm", _LARGE, device="b200")
    assert pytest.approx(measured_us, rel=1e-3) == found["1.3.0rc20"]
    assert found["1.3.0rc15"] < 0.9 * measured_us


def test_devices_of_no_known_limit_are_told_as_in_bursts(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(_rows("a30"))
    train(service)
    told = [_ask(service, _LARGE, "a30", sustained=lasts) for lasts in (False, True)]
    assert np.array_equal(told[0].latency_us, told[1].latency_us)
