"""Intervals hold as much truth as they say."""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from foretoken.predictor.intervals.calibration import (
    Calibration,
    HeldOutErrors,
    calibrate,
    half_width,
    held_out_bounds,
    join_errors,
    quantiles,
)
from foretoken.predictor.intervals.coverage import Tier

HARDER = (Tier.GAP, Tier.NEW_CONFIGURATION, Tier.BEYOND, Tier.FAR_CONFIGURATION)


def errors_of(num_rows: int, scale: float, seed: int = 0, tier: Tier = Tier.GRID) -> HeldOutErrors:
    """Return normal errors of three folds, a third as wide above 100 us."""
    rng = np.random.default_rng(seed)
    base_us = rng.uniform(1.0, 200.0, num_rows)
    width = np.where(base_us > 100.0, scale / 3, scale)
    return HeldOutErrors(
        error_log=rng.normal(0.0, width),
        spread_log=np.full(num_rows, 0.01),
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


def is_inside(calibration: Calibration, errors: HeldOutErrors) -> npt.NDArray[np.bool_]:
    """Tell which errors are inside the bounds."""
    low, high = calibration.bounds(errors.tier, errors.spread_log, errors.base_us, errors.octaves)
    return np.asarray((errors.error_log >= low) & (errors.error_log <= high))


def test_nominal_ninety_per_cent_of_new_errors_are_inside() -> None:
    inside = is_inside(calibrate(errors_of(3000, 0.1)), errors_of(3000, 0.1, seed=1))
    assert inside.mean() == pytest.approx(0.9, abs=0.02)
    # Each size has bounds of its own: both the noisy small and the steady large calls are at 90 %.
    is_small = errors_of(3000, 0.1, seed=1).base_us < 60
    assert inside[is_small].mean() == pytest.approx(0.9, abs=0.04)


def test_bounds_follow_a_spread_that_tells_doubtful_calls_from_others() -> None:
    rng = np.random.default_rng(2)
    spread_log = np.exp(rng.normal(0.0, 1.0, 3000))
    telling = dataclasses.replace(
        errors_of(3000, 0.0), error_log=rng.normal(0.0, 0.05 * spread_log), spread_log=spread_log
    )
    inside = is_inside(calibrate(telling), telling)
    assert inside[spread_log > 2].mean() == pytest.approx(0.9, abs=0.04)
    assert inside[spread_log < 0.5].mean() == pytest.approx(0.9, abs=0.04)


def test_bounds_do_not_follow_a_spread_that_tells_nothing() -> None:
    rng = np.random.default_rng(3)
    idle = dataclasses.replace(errors_of(3000, 0.1), spread_log=np.exp(rng.normal(0.0, 1.0, 3000)))
    assert calibrate(idle).spread_power == 0.0


def test_reported_bounds_are_calibrated_on_folds_left_out() -> None:
    errors = errors_of(900, 0.1)
    is_held = np.abs(errors.error_log) <= held_out_bounds(errors)
    assert is_held.mean() == pytest.approx(0.9, abs=0.03)


def test_every_tier_has_the_bounds_of_its_own_errors() -> None:
    scales = dict(zip(Tier, (0.05, 0.1, 0.2, 0.15, 0.3), strict=True))
    found = join_errors([errors_of(2000, scale, tier=tier) for tier, scale in scales.items()])
    calibration = calibrate(found)
    for tier, scale in scales.items():
        new = errors_of(2000, scale, seed=1, tier=tier)
        assert is_inside(calibration, new).mean() == pytest.approx(0.9, abs=0.03)


def test_no_tier_is_surer_than_the_grid() -> None:
    parts = [errors_of(300, 0.2), *(errors_of(300, 0.01, tier=tier) for tier in HARDER)]
    widths = calibrate(join_errors(parts)).tier_log
    assert widths.tolist() == [widths[Tier.GRID]] * len(Tier)


def test_a_tier_without_errors_is_wider_than_the_grid() -> None:
    for found in (None, errors_of(300, 0.05)):
        widths = calibrate(found).tier_log
        assert [widths[tier] > widths[Tier.GRID] for tier in HARDER] == [True] * len(HARDER)


def test_bounds_widen_with_the_distance_beyond_the_range() -> None:
    one = np.ones(3)
    for tier in (Tier.BEYOND, Tier.FAR_CONFIGURATION):
        low, high = calibrate(None).bounds(
            np.full(3, tier), 0.01 * one, one, octaves=np.array([0.1, 2.0, 5.0])
        )
        assert high[0] < high[1] < high[2]
        assert low[0] > low[1] > low[2]


def test_a_far_configuration_is_no_surer_than_its_regressor() -> None:
    one = np.ones(2)
    tiers = np.array([Tier.FAR_CONFIGURATION, Tier.NEW_CONFIGURATION])
    _, high = calibrate(errors_of(300, 0.01)).bounds(tiers, 2.0 * one, one, one)
    assert high[0] == pytest.approx(2.0 * 1.645)
    assert high[1] < 0.1


def test_bounds_beyond_the_range_are_learned_per_distance() -> None:
    """Errors of 0.4 at four octaves say 0.1 for each."""
    errors = dataclasses.replace(
        errors_of(100, 0.0, tier=Tier.BEYOND),
        error_log=np.tile([-0.4, 0.4], 50),
        octaves=np.full(100, 4.0),
    )
    exact = dataclasses.replace(errors_of(100, 0.0), base_us=errors.base_us)
    calibration = calibrate(join_errors([exact, errors]))
    one = np.ones(1)
    low, high = calibration.bounds(np.array([Tier.BEYOND]), one, one, np.array([2.0]))
    assert (low[0], high[0]) == pytest.approx((-0.2, 0.2))


def test_errors_that_sizes_share_do_not_make_the_interval_narrow() -> None:
    """Few sizes with many points each are few draws: of new sizes, still 90 % are inside."""
    shares = [
        is_inside(calibrate(clustered_errors(15, seed)), clustered_errors(60, seed + 1000)).mean()
        for seed in range(40)
    ]
    assert np.mean(shares) == pytest.approx(0.9, abs=0.03)


def test_points_that_err_alone_are_bounded_by_their_quantile() -> None:
    """Nothing is added for small groups where groups are not alike."""
    scores = np.linspace(0.0, 1.0, 2001)
    group = np.random.default_rng(0).permutation(2001) % 20
    assert half_width(scores, group) == pytest.approx(0.9, abs=0.011)


def test_two_groups_apart_are_bounded_by_more_than_the_worst() -> None:
    """What one group says must hold for the other."""
    scores = np.array([0.1] * 5 + [0.2] * 5)
    assert half_width(scores, np.repeat([0, 1], 5)) == pytest.approx(0.2 * 2.0)


def test_few_errors_give_their_extremes() -> None:
    """Finite samples: nine errors cannot show a 5 % tail, so the bounds are the worst seen."""
    assert quantiles(np.linspace(-0.4, 0.4, 9), np.arange(9)) == pytest.approx((-0.4, 0.4))
    assert quantiles(np.array([0.1, 0.2]), np.arange(2)) == pytest.approx((0.0, 0.2))


def test_sizes_at_which_a_model_is_exact_leave_the_bounds_of_all() -> None:
    """A ratio of nothing would make exact what is not."""
    errors = errors_of(3000, 0.1)
    exact = dataclasses.replace(
        errors, error_log=np.where(errors.base_us < 60, 0.0, errors.error_log)
    )
    low, high = calibrate(exact).bounds(exact.tier, exact.spread_log, exact.base_us, exact.octaves)
    assert (low < 0).all()
    assert (high > 0).all()
