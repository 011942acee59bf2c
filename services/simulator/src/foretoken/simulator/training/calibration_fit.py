"""The least squares behind a calibration: which parameters steps can tell, and their values."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# What steps can be corrected by.
PARAMETERS = ("factor", "gap", "step_gap")
# Sine of the angle between what a parameter does to the steps and what others can make of it. At
# this bound an error of one per cent in a step moves the parameter by ten per cent of a step.
_ANGLE_MIN = 0.1
# With one parameter more, steps that were left out must come out better by this ratio; with the
# first one, better than without any correction.
_GAIN_RATIO = 0.8
# Steps of one run differ by more: what errs less needs no other parameter.
_ENOUGH_RATIO = 0.002
_MANY_STEPS = 4
# Errors alike to this many digits are the same: then the parameter named first is taken.
_DIGITS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFit:
    """Correction of steps: `factor x (raw + gap_us x sensitivity + step_gap_us)`, times in µs."""

    factor: float = 1.0
    gap_us: float = 0.0
    step_gap_us: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTable:
    """Steps to fit to, in µs: measured, simulated, and what one µs of gap adds to each."""

    measured_us: Floats
    raw_us: Floats
    sensitivity: Floats

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.measured_us)

    def without(self, step: int) -> "StepTable":
        """Return all steps but one."""
        kept = np.arange(self.num_steps) != step
        return StepTable(
            measured_us=self.measured_us[kept],
            raw_us=self.raw_us[kept],
            sensitivity=self.sensitivity[kept],
        )

    def correct(self, fit: StepFit) -> Floats:
        """Return the corrected steps."""
        return fit.factor * (self.raw_us + fit.gap_us * self.sensitivity + fit.step_gap_us)

    def columns(self, parameters: Sequence[str]) -> Floats:
        """Return what each parameter does to every step, as a part of the measured step."""
        found = {"factor": self.raw_us, "gap": self.sensitivity, "step_gap": 1.0 + 0 * self.raw_us}
        return np.stack([found[name] / self.measured_us for name in parameters], axis=1)


def mean_error(measured: Floats, corrected: Floats) -> float:
    """Return the mean of the errors' absolute values, as a part of what was measured."""
    return float(np.mean(np.abs(corrected / measured - 1)))


def find_obstacle(table: StepTable, parameters: Sequence[str], num_spare: int = 1) -> str:
    """Return why steps cannot tell these parameters apart; empty where they can.

    Of several parameters there must be `num_spare` steps more than parameters.
    """
    needed = len(parameters) + num_spare if len(parameters) > 1 else 1
    if table.num_steps < needed:
        names = " and ".join(parameters)
        return f"{table.num_steps} step(s) cannot tell {names} apart: {needed} or more are needed"
    columns = table.columns(parameters)
    for place, name in enumerate(parameters):
        column, others = columns[:, place], np.delete(columns, place, axis=1)
        if not np.any(column):
            return f"{name} changes none of these steps"
        solved = np.linalg.lstsq(others, column, rcond=None)[0]
        left = np.linalg.norm(column - others @ solved) / np.linalg.norm(column)
        if left < _ANGLE_MIN:
            rest = " and ".join(other for other in parameters if other != name)
            return (
                f"{name} changes these steps as {rest} does (all but {left:.0%} of it), so they"
                " cannot be separated; measure steps that differ more, in micro batch size, layers"
                " per stage or number of micro batches"
            )
    return ""


def fit_steps(table: StepTable, parameters: Sequence[str]) -> StepFit:
    """Return the fit with the least relative errors; no gap is negative.

    All subsets of the gaps are tried, which at three parameters is exact and cheap.
    """
    best, best_error = StepFit(), np.inf
    for kept in _subsets(parameters):
        fit = _solve(table, kept)
        if fit.factor <= 0 or fit.gap_us < 0 or fit.step_gap_us < 0:
            continue
        error = float(np.sum((table.correct(fit) / table.measured_us - 1) ** 2))
        if error < best_error:
            best, best_error = fit, error
    return best


def leave_one_out(table: StepTable, parameters: Sequence[str]) -> Floats | None:
    """Return every step as fitted from the others, in µs; none where the others are too few."""
    corrected = np.empty(table.num_steps)
    for step in range(table.num_steps):
        others = table.without(step)
        if not others.num_steps or find_obstacle(others, parameters, num_spare=0):
            return None
        corrected[step] = table.correct(fit_steps(others, parameters))[step]
    return corrected


def choose_parameters(table: StepTable) -> tuple[str, ...]:
    """Return the parameters that predict steps left out best; more of them must earn it.

    None, where no correction predicts them better than the simulation as it is. One step alone
    cannot tell: a gap where it was slower than simulated, else a factor. A gap of whole steps fits
    any few of them, so it is considered from four on.
    """
    if table.num_steps == 1:
        is_slower = bool(table.measured_us[0] > table.raw_us[0])
        return ("gap",) if is_slower and np.any(table.sensitivity) else ("factor",)
    allowed = PARAMETERS if table.num_steps >= _MANY_STEPS else ("factor", "gap")
    chosen: tuple[str, ...] = ()
    chosen_error = mean_error(table.measured_us, table.raw_us)
    for count in range(1, len(allowed) + 1):
        errors = {
            parameters: round(mean_error(table.measured_us, left_out), _DIGITS)
            for parameters in itertools.combinations(allowed, count)
            if not find_obstacle(table, parameters)
            and (left_out := leave_one_out(table, parameters)) is not None
        }
        if errors:
            best = min(errors, key=errors.__getitem__)
            if errors[best] < _GAIN_RATIO * chosen_error and chosen_error > _ENOUGH_RATIO:
                chosen, chosen_error = best, errors[best]
    return chosen


def _subsets(parameters: Sequence[str]) -> Iterator[tuple[str, ...]]:
    gaps = [name for name in parameters if name != "factor"]
    factor = tuple(name for name in parameters if name == "factor")
    for count in range(len(gaps) + 1):
        for kept in itertools.combinations(gaps, count):
            yield (*factor, *kept)


def _solve(table: StepTable, parameters: Sequence[str]) -> StepFit:
    """Return the unbounded least squares: linear in the factor and in the factor times the gaps."""
    if not parameters:
        return StepFit()
    target = np.ones(table.num_steps)
    if "factor" not in parameters:
        target = target - table.raw_us / table.measured_us
    solved = np.linalg.lstsq(table.columns(parameters), target, rcond=None)[0]
    found = dict(zip(parameters, solved.tolist(), strict=True))
    factor = found.get("factor", 1.0)
    if factor <= 0:
        return StepFit(factor=factor)
    return StepFit(
        factor=factor,
        gap_us=found.get("gap", 0.0) / factor,
        step_gap_us=found.get("step_gap", 0.0) / factor,
    )
