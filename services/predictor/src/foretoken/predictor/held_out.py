"""What a training held out: for calibrating intervals, and for telling people how good it is."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.results.report import OperatorTrainingReport
from foretoken.predictor.features import Matrix
from foretoken.predictor.intervals.calibration import HeldOutErrors, held_out_bounds, join_errors
from foretoken.predictor.intervals.holdout import SplitKind
from foretoken.predictor.regression.cross_validation import Unseen
from foretoken.predictor.regression.series_regressor import mix
from foretoken.predictor.scoring import HeldOut, report_series
from foretoken.predictor.series import SeriesKey

_SPLIT_NAMES = {
    SplitKind.RANDOM: "inside",
    SplitKind.SIZES: "gap",
    SplitKind.CONFIGURATIONS: "new configuration",
    SplitKind.BEYOND: "beyond",
}


def to_errors(unseen: Sequence[Unseen], shares: Matrix) -> HeldOutErrors | None:
    """Return how far the members, mixed by their shares, were off; None where nothing was held out.

    `shares` has a row per tier and a column per member.
    """
    parts = [
        HeldOutErrors(
            error_log=part.truth_log - mix(part.answers, shares, part.tiers),
            spread_log=part.spread_log,
            base_us=part.base_us,
            octaves=part.octaves,
            tier=part.tiers,
            group=part.group,
            fold=np.zeros(len(part.tiers), dtype=np.int64),
        )
        for part in unseen
    ]
    if not parts:
        return None
    # Points asked of one model are one fold, whatever they were left out for.
    fold = np.concatenate([np.full(len(part.tiers), part.fold) for part in unseen])
    return replace(join_errors(parts), fold=fold)


def report_errors(
    key: SeriesKey,
    num_points: int,
    unseen: Sequence[Unseen],
    errors: HeldOutErrors | None,
    member_weights: dict[str, float],
) -> OperatorTrainingReport:
    """Return the report of a series; its intervals are calibrated on the other folds."""
    dim_names = key.spec.dim_names
    if errors is None:
        nothing = np.empty(0)
        points = np.empty((0, len(dim_names)), dtype=np.int64)
        splits = np.empty(0, dtype=np.str_)
        held_out = HeldOut(
            dim_names=dim_names,
            split=splits,
            points=points,
            measured_us=nothing,
            estimate_us=nothing,
            low_us=nothing,
            high_us=nothing,
        )
    else:
        width_log = held_out_bounds(errors)
        truth_log = np.concatenate([part.truth_log for part in unseen])
        estimate_us = errors.base_us * np.exp(truth_log - errors.error_log)
        names = [_SPLIT_NAMES[part.kind] for part in unseen for _ in part.tiers]
        held_out = HeldOut(
            dim_names=dim_names,
            split=np.array(names),
            points=np.concatenate([part.points for part in unseen]),
            measured_us=errors.base_us * np.exp(truth_log),
            estimate_us=estimate_us,
            low_us=estimate_us * np.exp(-width_log),
            high_us=estimate_us * np.exp(width_log),
        )
    place = key.topology or key.device
    return report_series(key.operator, place, num_points, held_out, member_weights)
