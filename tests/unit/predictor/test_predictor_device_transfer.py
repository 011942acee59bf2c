"""A device with few points borrows from others what its own points cannot tell."""

import dataclasses

import numpy as np
import pytest

from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.regression.prediction import RegressorState
from foretoken.predictor.series import Series, SeriesKey
from foretoken.predictor.transfer.device_law import DeviceLaw, fit_device_law
from foretoken.predictor.transfer.device_transfer import (
    DeviceTransferRegressor,
    is_device_transfer,
    own_state,
    restore,
    train_transfer_series,
)
from foretoken.predictor.transfer.library import DonorLibrary
from foretoken.predictor.transfer.pool import DonorPool
from foretoken.predictor.transfer.pooled_model import PooledModel

_CONFIG = PredictorConfig(state_folder="")
_SIZES = (16, 64, 256, 1024, 4096)
_POINTS = np.array([(m, n, k) for m in _SIZES for n in _SIZES for k in _SIZES])


def _series(device: str, slowdown: float, dtype: str = "bf16", framework: str = "vllm 1") -> Series:
    """Return GEMMs that take longest of all where they are about as large as the caches."""
    key = SeriesKey("gemm", device, "", dtype, "forward", framework)
    series = Series(key=key, points=_POINTS, latency_us=np.ones(len(_POINTS)))
    design = _design(series)
    bump_log = 0.8 * np.exp(-((design.transfer[:, 2] + 3.0) ** 2) / 4.0)
    return dataclasses.replace(series, latency_us=design.base_us * slowdown * np.exp(bump_log))


def _design(series: Series) -> Design:
    return build_design(series.key.spec, series.columns, series.key.target)


def _log_ratio(series: Series) -> np.ndarray:
    return np.log(series.latency_us / _design(series).base_us)


def _take(series: Series, rows: np.ndarray) -> Series:
    return dataclasses.replace(
        series, points=series.points[rows], latency_us=series.latency_us[rows]
    )


_DONORS = (_series("a100_sxm_80", 1.3), _series("h200_sxm", 1.4), _series("gb200", 1.5))
_OWN = _series("l40s", 2.0)
_DRAWN = np.random.default_rng(0).permutation(len(_POINTS))[:12]
_FEW = np.sort(_DRAWN)


@pytest.fixture(scope="module")
def pool() -> DonorPool:
    found = DonorLibrary.of([*_DONORS, _OWN], 0).find(_OWN.key)
    assert found is not None
    return found


def _error(pool: DonorPool, rows: np.ndarray) -> float:
    known = _take(_OWN, rows)
    model = pool.fit(_design(known), _log_ratio(known), _CONFIG, 0)
    return float(np.abs(model.log_ratio(_design(_OWN)) - _log_ratio(_OWN)).mean())


def test_a_pool_holds_every_other_device_and_nothing_of_the_own(pool: DonorPool) -> None:
    expected = ["a100_sxm_80", "h200_sxm", "gb200"]
    assert expected == [donor.device_name for donor in pool.donors]


@pytest.mark.parametrize(
    "stranger",
    [
        _series("h100_sxm", 1.0, dtype="fp8"),
        _series("h100_sxm", 1.0, framework=""),
        dataclasses.replace(
            _series("h100_sxm", 1.0),
            key=SeriesKey("gemm", "h100_sxm", "", "bf16", "forward", "vllm 1", "quant=int4_wo"),
        ),
    ],
    ids=["other width", "united frameworks", "other variant"],
)
def test_what_is_not_alike_is_not_lent(stranger: Series) -> None:
    assert DonorLibrary.of([stranger], 0).find(_OWN.key) is None


def test_both_16_bit_formats_lend_to_each_other() -> None:
    assert DonorLibrary.of([_series("h100_sxm", 1.0, dtype="fp16")], 0).find(_OWN.key) is not None


def test_every_measured_point_helps(pool: DonorPool) -> None:
    none, few, many = (_error(pool, np.sort(_DRAWN[:count])) for count in (0, 6, 12))
    assert many < few < none


def test_the_basis_names_donors_and_own_points(pool: DonorPool) -> None:
    known = _take(_OWN, _FEW)
    basis = pool.fit(_design(known), _log_ratio(known), _CONFIG, 0).basis
    assert basis.startswith("3 gemm series of 3 other devices, nearest ")
    assert basis.endswith("; 12 own points")


def test_a_model_comes_back_from_its_state(pool: DonorPool) -> None:
    known = _take(_OWN, _FEW)
    model = pool.fit(_design(known), _log_ratio(known), _CONFIG, 0)
    again = PooledModel.from_state(model.to_state())
    assert again is not None
    design = _design(_OWN)
    assert model.log_ratio(design).tolist() == again.log_ratio(design).tolist()


def test_equal_trainings_give_equal_states(pool: DonorPool) -> None:
    known = _take(_OWN, _FEW)
    first, second = (
        pool.fit(_design(known), _log_ratio(known), _CONFIG, 0).to_state().arrays for _ in range(2)
    )
    assert {name: array.tobytes() for name, array in first.items()} == {
        name: array.tobytes() for name, array in second.items()
    }


def test_borrowing_beats_the_own_points_alone(pool: DonorPool) -> None:
    known, design = _take(_OWN, _FEW), _design(_OWN)
    tiers = np.zeros(design.num_rows, dtype=np.int64)
    errors = [
        np.abs(model.regressor.predict(design, tiers).log_ratio - _log_ratio(_OWN)).mean()
        for model in (
            train_transfer_series(known, pool, _CONFIG, 0),
            train_transfer_series(known, None, _CONFIG, 0),
        )
    ]
    assert errors[0] < 0.9 * errors[1]


def test_a_borrowing_regressor_comes_back_from_its_state(pool: DonorPool) -> None:
    regressor = train_transfer_series(_take(_OWN, _FEW), pool, _CONFIG, 0).regressor
    assert isinstance(regressor, DeviceTransferRegressor)
    state = regressor.to_state()
    assert is_device_transfer(state)
    assert own_state(state).arrays.keys() == regressor.own.to_state().arrays.keys()
    again = restore(regressor.own, state)
    design = _design(_OWN)
    tiers = np.zeros(design.num_rows, dtype=np.int64)
    expected = regressor.predict(design, tiers).log_ratio.tolist()
    assert expected == again.predict(design, tiers).log_ratio.tolist()


def test_what_was_borrowed_by_another_law_is_left_out(pool: DonorPool) -> None:
    regressor = train_transfer_series(_take(_OWN, _FEW), pool, _CONFIG, 0).regressor
    assert isinstance(regressor, DeviceTransferRegressor)
    state = regressor.to_state()
    earlier = {key: value for key, value in state.numbers.items() if "law_revision" not in key}
    assert len(earlier) == len(state.numbers) - 1
    assert regressor.own is restore(regressor.own, dataclasses.replace(state, numbers=earlier))


def test_another_state_is_not_borrowing() -> None:
    assert not is_device_transfer(RegressorState())


def test_who_lends_is_part_of_a_model_s_identity(pool: DonorPool) -> None:
    known = _take(_OWN, _FEW)
    fewer = DonorLibrary.of(_DONORS[:2], 0).find(_OWN.key)
    hashes = {
        train_transfer_series(known, lender, _CONFIG, 0).content_hash
        for lender in (pool, fewer, None)
    }
    assert 3 == len(hashes)


def test_a_law_is_found_again_from_what_it_says() -> None:
    law = DeviceLaw(np.array([0.3, 0.5, 0.3, 0.1, -0.5, 1.2, 0.2]))
    design = _design(_OWN)
    found = fit_device_law(design, law.log_ratio(design))
    assert law.log_ratio(design) == pytest.approx(found.log_ratio(design), abs=0.03)


def test_a_law_that_reaches_its_data_sheet_takes_the_base_latency() -> None:
    """All shares one, computing and moving wholly at once, and no work that does not fill it."""
    law = DeviceLaw(np.array([0.0, 0.0, 0.0, 0.0, 0.0, 5.0, -20.0]))
    for series in (_OWN, *_DONORS):
        np.testing.assert_allclose(0.0, law.log_ratio(_design(series)), atol=1e-2)
