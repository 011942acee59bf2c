"""What leaving points out taught of a series survives being written, and trains the same model."""

from pathlib import Path

import numpy as np
import pytest
from predictor_fakes import FakeCatalog, all_reduce_rows, gemm_rows

from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.series import Series
from foretoken.predictor.trainer import SeriesModel, train_series, tune
from foretoken.predictor.training_rows import read_series
from foretoken.predictor.tuning import read_tunings, write_tunings

_CONFIG = PredictorConfig(state_folder="")
_NAMES = ("0123456789abcdef" + 48 * "0", "fedcba9876543210" + 48 * "0")


def _series(rows: list[dict[str, object]]) -> Series:
    return read_series(FakeCatalog(rows).read_measurements(MeasurementFilter()))[0]


@pytest.fixture(scope="module")
def trained() -> list[SeriesModel]:
    """GEMMs of two slopes, one of them in steps."""
    rates = (lambda d: 1.5 + 40 / d["m"], lambda d: 2.0 + d["m"] // 192)
    return [train_series(_series(gemm_rows(rate)), _CONFIG, 0) for rate in rates]


def test_a_model_that_is_told_says_the_same(trained: list[SeriesModel], tmp_path: Path) -> None:
    """Up to what numbers lose when they are written: five parts in ten thousand."""
    path = tmp_path / "tuning.bin"
    path.write_bytes(write_tunings(dict(zip(_NAMES, map(tune, trained), strict=True))))
    found = read_tunings(path)
    assert 2 == len(found)
    for name, full in zip(_NAMES, trained, strict=True):
        tuning = found.find(name)
        assert tuning is not None
        told = train_series(full.series, _CONFIG, 0, tuning=tuning)
        design = full.series.design
        for tier in range(5):
            tiers = np.full(design.num_rows, tier)
            one, other = (model.regressor.predict(design, tiers) for model in (full, told))
            np.testing.assert_allclose(one.log_ratio, other.log_ratio, atol=1e-9)
            np.testing.assert_allclose(one.spread_log, other.spread_log, rtol=1e-3)
            near = np.ones(design.num_rows)
            bounds = (
                model.calibration.bounds(tiers, near, design.base_us, near)[1]
                for model in (full, told)
            )
            np.testing.assert_allclose(*bounds, rtol=2e-3)
        assert full.report.num_held_out == told.report.num_held_out
        assert full.report.held_out_mape_ratio == pytest.approx(
            told.report.held_out_mape_ratio, rel=1e-3
        )
        assert full.report.member_weights == told.report.member_weights


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    found = read_tunings(tmp_path / "tuning.bin")
    assert (0, None) == (len(found), found.find(_NAMES[0]))


def test_what_is_curves_has_no_tuning() -> None:
    model = train_series(_series(all_reduce_rows()), _CONFIG, 0)
    with pytest.raises(TypeError, match="no members"):
        tune(model)
