"""How much each member is believed, learned from points that none of them had seen."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from foretoken.predictor.features import Matrix
from foretoken.predictor.intervals.coverage import Tier
from foretoken.predictor.regression.cross_validation import Unseen
from foretoken.predictor.regression.member import STEPS
from foretoken.predictor.roofline import FloatColumn, IntColumn

# Shares are multiples of a tenth: finer ones would follow the noise of the points left out.
_NUM_STEPS = 10
# Equal shares are left for others only if those err less by this share: members that err apart
# average out, and few points left out tell little.
_MIN_GAIN = 0.01
_MIN_ROWS = 20
_LIKE = {
    Tier.GAP: Tier.GRID,
    Tier.NEW_CONFIGURATION: Tier.GAP,
    Tier.BEYOND: Tier.GRID,
    Tier.FAR_CONFIGURATION: Tier.NEW_CONFIGURATION,
}


def learn_shares(parts: Sequence[Unseen], num_members: int) -> Matrix:
    """Return the shares of the members (columns) by tier (rows).

    A tier of which too few points were left out takes the shares of the one most like it.
    """
    candidates = _list_candidates(num_members)
    shares = np.tile(candidates[0], (len(Tier), 1))
    if not parts:
        return shares
    answers = np.concatenate([part.answers for part in parts])
    truth_log = np.concatenate([part.truth_log for part in parts])
    tiers = np.concatenate([part.tiers for part in parts])
    group = _number_groups(parts)
    for tier in Tier:
        rows = np.flatnonzero(tiers == tier)
        if len(rows) >= _MIN_ROWS:
            error_log = _sum_errors(candidates, answers[rows], truth_log[rows], group[rows])
            shares[tier] = candidates[_choose(candidates, error_log)]
        elif tier in _LIKE:
            shares[tier] = shares[_LIKE[tier]]
    return shares


def _list_candidates(num_members: int) -> Matrix:
    """Return equal shares without the steps, then all multiples of a tenth that add up to one."""
    equal = np.ones(num_members)
    equal[STEPS : STEPS + 1] = 0.0
    return np.stack([equal / equal.sum(), *_multiples(num_members)])


def _multiples(num_members: int) -> Iterator[FloatColumn]:
    for tenths in itertools.product(range(_NUM_STEPS + 1), repeat=num_members - 1):
        if sum(tenths) <= _NUM_STEPS:
            yield np.array([*tenths, _NUM_STEPS - sum(tenths)]) / _NUM_STEPS


def _number_groups(parts: Sequence[Unseen]) -> IntColumn:
    """Return the group of every point, those of different parts apart."""
    sizes = [int(part.group.max(initial=0)) + 1 for part in parts]
    starts = np.cumsum([0, *sizes[:-1]])
    return np.concatenate(
        [part.group + start for part, start in zip(parts, starts.tolist(), strict=True)]
    )


def _sum_errors(
    candidates: Matrix, answers: Matrix, truth_log: FloatColumn, group: IntColumn
) -> Matrix:
    """Return the summed error of every candidate (rows) in every group (columns)."""
    codes = np.unique(group, return_inverse=True)[1].reshape(-1)
    return np.stack(
        [np.bincount(codes, np.abs(answers @ shares - truth_log)) for shares in candidates]
    )


def _choose(candidates: Matrix, error_log: Matrix) -> int:
    """Return the candidate that errs least, with steps only where that is no chance.

    Steps err most of all on their own: they have to gain more than the standard error of the gain
    over groups of points left out.
    """
    total_log = error_log.sum(axis=1)
    has_steps = candidates[:, STEPS : STEPS + 1].any(axis=1)
    best = int(np.argmin(np.where(has_steps, np.inf, total_log)))
    if total_log[best] >= (1.0 - _MIN_GAIN) * total_log[0]:
        best = 0
    with_steps = int(np.argmin(total_log))
    gain_log = error_log[best] - error_log[with_steps]
    # Points of a group err together: what groups gain is distinguished from chance, not what points
    # do.
    chance_log = np.sqrt(((gain_log - gain_log.mean()) ** 2).sum())
    is_better = gain_log.sum() > max(_MIN_GAIN * total_log[best], chance_log)
    return with_steps if is_better else best
