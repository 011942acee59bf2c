"""Intervals hold as much truth as they say."""

import numpy as np
import pytest

from foretoken.predictor.calibration import (
    HeldOutErrors,
    calibrate,
    held_out_coverage,
    quantiles,
)
from foretoken.predictor.coverage import Tier


def errors_of(num_rows: int, scale: float, seed: int = 0) -> HeldOutErrors:
    """Return normal errors of three folds, a third as wide above 100 us."""
    rng = np.random.default_rng(seed)
    base_us = rng.uniform(1.0, 200.0, num_rows)
    width = np.where(base_us > 100.0, scale / 3, scale)
    return HeldOutErrors(rng.normal(0.0, width), base_us, np.arange(num_rows) % 3)


def test_nominal_ninety_per_cent_of_new_errors_are_inside() -> None:
    calibration = calibrate({Tier.GRID: errors_of(3000, 0.1)})
    new = errors_of(3000, 0.1, seed=1)
    grid = np.full(3000, Tier.GRID)
    low, high = calibration.bounds(grid, new.base_us, np.zeros(3000))
    inside = (new.error_log >= low) & (new.error_log <= high)
    assert inside.mean() == pytest.approx(0.9, abs=0.03)
    # Each size has bounds of its own: both the noisy small and the steady large calls are at 90 %.
    assert inside[new.base_us < 60].mean() == pytest.approx(0.9, abs=0.04)


def test_reported_coverage_is_measured_on_folds_left_out() -> None:
    assert held_out_coverage(errors_of(900, 0.1)) == pytest.approx(0.9, abs=0.04)


def test_a_tier_is_never_surer_than_the_one_before() -> None:
    calibration = calibrate(
        {
            Tier.GRID: errors_of(300, 0.2),
            Tier.NEW_CONFIGURATION: errors_of(300, 0.01),
            Tier.BEYOND: errors_of(300, 0.5),
        }
    )
    assert (np.diff(calibration.low_log, axis=0) <= 0).all()
    assert (np.diff(calibration.high_log, axis=0) >= 0).all()
    assert calibration.high_log[Tier.BEYOND].min() > calibration.high_log[Tier.GRID].max()


def test_a_tier_without_errors_is_wider_than_the_one_before() -> None:
    for found in ({}, {Tier.GRID: errors_of(300, 0.05)}):
        calibration = calibrate(found)
        assert (np.diff(calibration.high_log, axis=0) > 0).all()
        assert (np.diff(calibration.low_log, axis=0) < 0).all()


def test_bounds_widen_with_the_distance_beyond_the_range() -> None:
    calibration = calibrate({})
    tiers = np.array([Tier.BEYOND] * 3)
    low, high = calibration.bounds(tiers, np.ones(3), np.array([0.1, 2.0, 5.0]))
    assert high[0] < high[1] < high[2]
    assert low[0] > low[1] > low[2]


def test_few_errors_give_their_extremes() -> None:
    """Finite samples: nine errors cannot show a 5 % tail, so the bounds are the worst seen."""
    assert quantiles(np.linspace(-0.4, 0.4, 9)) == pytest.approx((-0.4, 0.4))
    assert quantiles(np.array([0.1, 0.2])) == pytest.approx((0.0, 0.2))
