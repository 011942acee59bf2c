"""Fit by what factors estimates are off from what was observed end to end."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.measurements.correction import (
    CorrectedObservation,
    Correction,
    CorrectionRequest,
    Observation,
)
from foretoken.predictor.regression.light_imports import fit_not_negative
from foretoken.predictor.roofline import FloatColumn

Matrix = npt.NDArray[np.float64]

# The key of the factor of every operator without one of its own.
COMMON_FACTOR = ""

# How strongly the groups are drawn towards the common factor, the strongest first: against
# relative errors, so that 1 outweighs an observation, and the least gives way to errors of 1 %.
_SHRINKAGES = (float("inf"), 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0001)
# How many times slower or faster than the rest a group may be said to be. Source: measured
# operators take 1 to 5 times their roofline; what is further off is another kernel, or missing.
_MAX_APART_RATIO = 5.0
# More observations than these are left out some at a time.
_MAX_FOLDS = 20


def learn_correction(
    request: CorrectionRequest,
    raw_us: Mapping[str, FloatColumn],
    model_version: str,
    created_at: str,
) -> Correction:
    """Return the correction that the observations suggest.

    `raw_us` has a column for each group of operators: what it is estimated to take in each
    observation. One factor is the geometric mean of observed over estimated. Factors by group fit
    the relative errors, drawn towards that one as strongly as does best for observations left out;
    the estimate of each from the others takes none of these choices over.

    Raises:
        InvalidRequestError: an observation is estimated to take no time, or less than none.

    """
    groups = tuple(raw_us)
    matrix = np.stack([np.asarray(raw_us[group]) for group in groups], axis=1)
    observed_us = np.array([item.observed_us for item in request.observations])
    _check(matrix, observed_us)
    fit = _fit_groups if request.by_group else _fit_common
    factors = fit(matrix, observed_us)
    raw, corrected = matrix.sum(axis=1), matrix @ factors
    has_others = len(observed_us) > 1
    left_out = _leave_out(matrix, observed_us, fit) if has_others else np.zeros(1)
    by_group = dict(zip(groups, factors.tolist(), strict=True)) if request.by_group else {}
    return Correction(
        name=request.name,
        device=request.device,
        created_at=created_at,
        model_version=model_version,
        factors={COMMON_FACTOR: _common_factor(matrix, observed_us), **by_group},
        observations=tuple(_report(request.observations, raw, corrected, left_out)),
        raw_error_ratio=_mean_error(raw, observed_us),
        corrected_error_ratio=_mean_error(corrected, observed_us),
        left_out_error_ratio=_mean_error(left_out, observed_us) if has_others else 0.0,
    )


def _check(raw_us: Matrix, observed_us: FloatColumn) -> None:
    ratios = raw_us.sum(axis=1) / observed_us
    violations = [
        FieldViolation(f"observations[{index}].calls", "must be estimated to take some time")
        for index in np.flatnonzero((ratios <= 0) | ~np.isfinite(ratios) | (raw_us < 0).any(axis=1))
    ]
    if violations:
        raise InvalidRequestError.of_violations(violations, "correction")


_Fit = Callable[[Matrix, FloatColumn], FloatColumn]


def _common_factor(raw_us: Matrix, observed_us: FloatColumn) -> float:
    return float(np.exp(np.log(observed_us / raw_us.sum(axis=1)).mean()))


def _fit_common(raw_us: Matrix, observed_us: FloatColumn) -> FloatColumn:
    return np.full(raw_us.shape[1], _common_factor(raw_us, observed_us))


def _fit_groups(raw_us: Matrix, observed_us: FloatColumn) -> FloatColumn:
    """Return the groups' factors with the pull that does best for observations left out."""
    return _fit_pulled(raw_us, observed_us, _choose_shrinkage(raw_us, observed_us))


def _choose_shrinkage(raw_us: Matrix, observed_us: FloatColumn) -> float:
    """Return the strongest pull that no weaker one clearly beats on observations left out.

    Clearly is by the share that a mean of so many squares is uncertain by, one over their root.
    """
    chosen, least = _SHRINKAGES[0], float("inf")
    if len(observed_us) == 1:
        return chosen
    least_gain_ratio = len(observed_us) ** -0.5
    for shrinkage in _SHRINKAGES:
        fit = partial(_fit_pulled, shrinkage=shrinkage)
        left_out_us = _leave_out(raw_us, observed_us, fit)
        error = float((np.log(left_out_us / observed_us) ** 2).mean())
        if error < least * (1.0 - least_gain_ratio):
            chosen, least = shrinkage, error
    return chosen


def _fit_pulled(raw_us: Matrix, observed_us: FloatColumn, shrinkage: float) -> FloatColumn:
    """Return the factors of least relative errors plus pull, none absurdly far from the rest.

    With x a group's factor over the common one and s its share of an observed time, that is
    sum((1 - s x)^2) + shrinkage * sum((x - 1)^2), over x from the least allowed up.
    """
    common = _common_factor(raw_us, observed_us)
    num_groups = raw_us.shape[1]
    if np.isinf(shrinkage):
        return np.full(num_groups, common)
    shares = common * raw_us / observed_us[:, np.newaxis]
    rows = np.concatenate([shares, np.sqrt(shrinkage) * np.eye(num_groups)])
    wanted = np.concatenate([np.ones(len(shares)), np.full(num_groups, np.sqrt(shrinkage))])
    least = 1.0 / _MAX_APART_RATIO
    above = fit_not_negative(rows, wanted - rows.sum(axis=1) * least)
    return np.asarray(common * np.minimum(least + above, _MAX_APART_RATIO))


def _leave_out(raw_us: Matrix, observed_us: FloatColumn, fit: _Fit) -> FloatColumn:
    """Return each observation's estimate, corrected by what the others suggest."""
    fold = np.arange(len(observed_us)) % _MAX_FOLDS
    left_out_us = np.empty(len(observed_us))
    for index in range(int(fold.max()) + 1):
        is_left_out = fold == index
        factors = fit(raw_us[~is_left_out], observed_us[~is_left_out])
        left_out_us[is_left_out] = raw_us[is_left_out] @ factors
    return left_out_us


def _mean_error(estimate_us: FloatColumn, observed_us: FloatColumn) -> float:
    return float(np.abs(estimate_us / observed_us - 1.0).mean())


def _report(
    observations: tuple[Observation, ...],
    raw_us: FloatColumn,
    corrected_us: FloatColumn,
    left_out_us: FloatColumn,
) -> Iterator[CorrectedObservation]:
    columns = zip(observations, raw_us, corrected_us, left_out_us, strict=True)
    for observation, raw, corrected, left_out in columns:
        yield CorrectedObservation(
            name=observation.name,
            observed_us=observation.observed_us,
            raw_us=float(raw),
            corrected_us=float(corrected),
            left_out_us=float(left_out),
        )
