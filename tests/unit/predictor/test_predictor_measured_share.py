"""How much a point's own measurement counts in its estimate."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from predictor_fakes import Rows, columns_of, gemm_rows

from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable, Provenance
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.service import PredictorService
from foretoken.predictor.trainer import SeriesModel, train_series

_KEY = SeriesKey("gemm", "h200_sxm", "", "bf16", "forward", "vllm 0.24.0")
_VLLM = {"framework": "vllm", "framework_version": "0.24.0"}

Train = Callable[..., PredictorTrainingReport]
MakePredictor = Callable[[Rows], PredictorService]


@pytest.fixture(scope="module")
def model() -> SeriesModel:
    points = np.array([[2**i, 1024, 1024 * j] for i in range(6) for j in (1, 2, 3)])
    series = Series(key=_KEY, points=points, latency_us=10.0 + points[:, 0] * points[:, 2] / 1e4)
    return train_series(series, PredictorConfig(state_folder=""), 0)


def _erring(model: SeriesModel, error_ratio: float, noise_log: float = 0.0) -> SeriesModel:
    report = replace(model.report, num_held_out=50, held_out_mape_ratio=error_ratio)
    return replace(model, report=report, series=replace(model.series, noise_log=noise_log))


def test_both_count_by_the_inverse_of_their_variances(model: SeriesModel) -> None:
    """A tenth is the mean of an error of 0.125, of which 0.1 is noise: 90 % are within 0.164."""
    share = _erring(model, 0.125 * np.sqrt(2.0 / np.pi), 0.1645).measured_share
    model_variance, noise_variance = 0.125**2 - 0.1**2, 0.1**2
    by_inverse = (1.0 / noise_variance) / (1.0 / noise_variance + 1.0 / model_variance)
    # The model, at 0.075, is the surer one; never of a point that was measured.
    assert by_inverse < 0.5 == share
    share = _erring(model, 0.125 * np.sqrt(2.0 / np.pi), 0.0823).measured_share
    assert share == pytest.approx(1.0 - 0.05**2 / 0.125**2, rel=1e-3)


def test_the_more_a_model_errs_the_more_a_measurement_counts(model: SeriesModel) -> None:
    shares = [_erring(model, error).measured_share for error in (0.0, 0.01, 0.05, 0.1, 0.3)]
    assert shares == sorted(shares)
    assert shares[0] == shares[1] == 0.5
    assert shares[2] == pytest.approx(0.89, abs=0.01)
    assert shares[-1] > 0.99


def test_a_measurement_is_all_where_nobody_knows_how_far_the_model_is_off(
    model: SeriesModel,
) -> None:
    unknown = replace(model, report=replace(model.report, num_held_out=0))
    assert unknown.measured_share == 1.0


def test_own_points_are_answered_by_their_measurements_those_of_another_product_by_half(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Of times that jump from size to size no model tells anything."""
    rng = np.random.default_rng(5)
    rows = gemm_rows(lambda _: float(rng.lognormal(0.4, 0.3)), device="h200_sxm", **_VLLM)
    service = make_predictor(rows)
    train(service)
    columns = columns_of(*(dict(row["dims"]) for row in rows))
    table = OperatorTable(operator="gemm", dtype=DType.FP16, columns=columns)
    off: dict[str, float] = {}
    for device in ("h200_sxm", "h100_sxm"):
        query = LatencyQuery(device=device, tables=(table,), framework="vllm 0.24.0")
        found = service.predict(query).tables[0]
        sure = service.predict(replace(query, prefer_measured=True)).tables[0]
        off[device] = float(np.abs(np.log(found.latency_us / sure.latency_us)).mean())
    assert (found.provenance != Provenance.MEASURED.value).all()
    assert off["h200_sxm"] < 0.02
    assert off["h100_sxm"] > 0.05
