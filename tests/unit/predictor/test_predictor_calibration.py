"""Intervals hold as much truth as they say."""

import dataclasses

import numpy as np
import pytest

from foretoken.predictor.calibration import (
    HeldOutErrors,
    calibrate,
    held_out_coverage,
    join_errors,
    quantiles,
)
from foretoken.predictor.coverage import Tier


def errors_of(num_rows: int, scale: float, seed: int = 0, tier: Tier = Tier.GRID) -> HeldOutErrors:
    """Return normal errors of three folds, a third as wide above 100 us."""
    rng = np.random.default_rng(seed)
    base_us = rng.uniform(1.0, 200.0, num_rows)
    width = np.where(base_us > 100.0, scale / 3, scale)
    return HeldOutErrors(
        error_log=rng.normal(0.0, width),
        base_us=base_us,
        octaves=np.zeros(num_rows),
        tier=np.full(num_rows, tier),
        group=np.arange(num_rows),
        fold=np.arange(num_rows) % 3,
    )


def clustered_errors(num_groups: int, seed: int) -> HeldOutErrors:
    """Return errors of which nearly all is shared by the 50 points of a group."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(num_groups), 50)
    shared = rng.normal(0.0, 0.1, num_groups)[group]
    return dataclasses.replace(
        errors_of(len(group), 0.0, seed),
        error_log=shared + rng.normal(0.0, 0.01, len(group)),
        base_us=np.ones(len(group)),
        group=group,
        fold=group % 3,
    )


def test_nominal_ninety_per_cent_of_new_errors_are_inside() -> None:
    calibration = calibrate(errors_of(3000, 0.1))
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
        join_errors(
            [
                errors_of(300, 0.2),
                errors_of(300, 0.01, tier=Tier.NEW_CONFIGURATION),
                errors_of(300, 0.5, tier=Tier.BEYOND),
            ]
        )
    )
    assert (np.diff(calibration.low_log, axis=0) <= 0).all()
    assert (np.diff(calibration.high_log, axis=0) >= 0).all()
    assert calibration.high_log[Tier.BEYOND].min() > calibration.high_log[Tier.GRID].max()


def test_a_tier_without_errors_is_wider_than_the_one_before() -> None:
    for found in (None, errors_of(300, 0.05)):
        calibration = calibrate(found)
        assert (np.diff(calibration.high_log, axis=0) > 0).all()
        assert (np.diff(calibration.low_log, axis=0) < 0).all()


def test_bounds_widen_with_the_distance_beyond_the_range() -> None:
    calibration = calibrate(None)
    tiers = np.array([Tier.BEYOND] * 3)
    low, high = calibration.bounds(tiers, np.ones(3), np.array([0.1, 2.0, 5.0]))
    assert high[0] < high[1] < high[2]
    assert low[0] > low[1] > low[2]


def test_bounds_beyond_the_range_are_learned_per_distance() -> None:
    """Errors of 0.4 at four octaves say 0.1 for each."""
    errors = dataclasses.replace(
        errors_of(100, 0.0, tier=Tier.BEYOND),
        error_log=np.tile([-0.4, 0.4], 50),
        octaves=np.full(100, 4.0),
    )
    calibration = calibrate(join_errors([errors_of(100, 1e-6), errors]))
    low, high = calibration.bounds(np.array([Tier.BEYOND]), np.ones(1), np.array([2.0]))
    assert (low[0], high[0]) == pytest.approx((-0.2, 0.2))


def test_errors_that_sizes_share_do_not_make_the_interval_narrow() -> None:
    """Few sizes with many points each are few draws: of new sizes, still 90 % are inside."""
    shares = []
    for seed in range(40):
        calibration = calibrate(clustered_errors(15, seed))
        new = clustered_errors(60, seed + 1000)
        low, high = calibration.bounds(new.tier, new.base_us, new.octaves)
        shares.append(((new.error_log >= low) & (new.error_log <= high)).mean())
    assert np.mean(shares) >= 0.87


def test_few_errors_give_their_extremes() -> None:
    """Finite samples: nine errors cannot show a 5 % tail, so the bounds are the worst seen."""
    assert quantiles(np.linspace(-0.4, 0.4, 9), np.arange(9)) == pytest.approx((-0.4, 0.4))
    assert quantiles(np.array([0.1, 0.2]), np.arange(2)) == pytest.approx((0.0, 0.2))
