"""Learn host gaps and a global factor from a few measured training steps.

A step is taken as `factor x (simulated with gaps + step gap)`. How much a gap in every layer adds
to a step is simulated too: a pipeline does not count layers. The gap of the forward pass and that
of the backward pass lengthen a step alike, so steps tell their sum only; times of single layers
(`encoder_fwd`, `encoder_bwd`) tell each. A gap is the time a cluster's hosts need for launches,
which carries over to other models on the same cluster and software, not to other clusters.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.measurements.training_truth import TrainingCalibration
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import US_PER_MS
from foretoken.simulator.grid import Floats
from foretoken.simulator.training.calibration_fit import (
    PARAMETERS,
    StepFit,
    StepTable,
    choose_parameters,
    find_obstacle,
    fit_steps,
    leave_one_out,
    mean_error,
)
from foretoken.simulator.training.measured_file import STEP, MeasuredTime

Simulate = Callable[[TrainingScenario], TrainingReport]

LAYER_COMPONENTS = ("encoder_fwd", "encoder_bwd")
# Of the gap of a layer, what its backward pass has: the measured gaps of GPT-NeoX on A100 and on
# GH200 are about twice those of the forward pass. Steps come out the same whatever it is.
_BACKWARD_SHARE = 2 / 3
# Gaps to look with what a gap adds to a step: small compared with a layer, and larger where the
# host is so busy with launches that a small one is hidden.
_PROBES_US = (100.0, 1_000.0, 10_000.0)
# The critical path, and with it what a gap adds, may change with the gap.
_NUM_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentPair:
    """A component as measured and as simulated without calibration, in µs."""

    component: str
    measured_us: float
    simulated_us: float
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedStep:
    """A measured step and the simulated one; `left_out_ms` as fitted from the others (0: no)."""

    name: str
    measured_ms: float
    raw_ms: float
    calibrated_ms: float
    left_out_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationResult:
    """A calibration, what it was learned from, and how it errs; errors are means of ratios.

    `left_out_error_ratio` is what to expect of a step not seen; negative where steps were too few.
    """

    calibration: TrainingCalibration
    parameters: tuple[str, ...] = ()
    steps: tuple[CalibratedStep, ...] = ()
    components: tuple[ComponentPair, ...] = ()
    raw_error_ratio: float = 0.0
    calibrated_error_ratio: float = 0.0
    left_out_error_ratio: float = -1.0
    notes: tuple[str, ...] = ()


def calibrate_from_components(
    pairs: Sequence[ComponentPair], source: str = ""
) -> TrainingCalibration:
    """Return the gaps per layer that measured layers tell.

    Each gap is the median over the rows of what was measured beyond what was simulated: single
    stages may have waited for others inside a layer. A layer simulated as slower has no gap.

    Raises:
        InvalidRequestError: one of the two passes was not measured.

    """
    gaps = []
    for component in LAYER_COMPONENTS:
        beyond = [
            pair.measured_us - pair.simulated_us for pair in pairs if pair.component == component
        ]
        if not beyond:
            _refuse(f"{component} is missing; the gaps of a layer need both passes")
        gaps.append(max(0.0, statistics.median(beyond)))
    return TrainingCalibration(source=source, forward_gap_us=gaps[0], backward_gap_us=gaps[1])


def calibrate_training(
    scenarios: Mapping[str, TrainingScenario],
    measured: Sequence[MeasuredTime],
    simulate: Simulate,
    parameters: Sequence[str] = (),
    source: str = "",
) -> CalibrationResult:
    """Return the calibration that makes simulated steps of these scenarios the measured ones.

    `parameters` are some of `PARAMETERS`; none named, those are taken that predict steps left out
    best. Measured layers fix the gaps first. What the scenarios say of a calibration is not used.

    Raises:
        InvalidRequestError: nothing to learn from, a scenario there is not or that cannot run, or
            parameters that the steps cannot tell apart; says why.
        UnknownPluginError: no such parameter.

    """
    for name in parameters:
        UnknownPluginError.look_up(name, dict.fromkeys(PARAMETERS, name))
    runs = {name: replace(scenario, calibration=None) for name, scenario in scenarios.items()}
    found, notes = _sort_times(runs, measured)
    raw = {name: _simulate(simulate, name, runs[name]) for name in found}
    pairs = tuple(pair for name in found for pair in _pairs(name, found[name], raw[name]))
    gaps = calibrate_from_components(pairs, source) if pairs else None
    notes = (*notes, *_describe_gaps(gaps))
    steps = {name: times[STEP, -1] for name, times in found.items() if (STEP, -1) in times}
    if not steps:
        if gaps is None:
            _refuse("no times of steps, nor of encoder_fwd and encoder_bwd")
        return CalibrationResult(calibration=gaps, components=pairs, notes=notes)
    study = _StepStudy(
        runs, steps, {name: raw[name].step_time_ms for name in steps}, simulate, gaps
    )
    return replace(study.calibrate(tuple(parameters), source, notes), components=pairs)


class _StepStudy:
    """Steps as measured and as simulated, at gaps known from layers or at none."""

    def __init__(
        self,
        runs: Mapping[str, TrainingScenario],
        steps: Mapping[str, float],
        raw_ms: Mapping[str, float],
        simulate: Simulate,
        gaps: TrainingCalibration | None,
    ) -> None:
        self._runs = runs
        self._names = tuple(steps)
        self._simulate = simulate
        self._gaps = gaps
        self._measured_us = np.array(list(steps.values())) * US_PER_MS
        self._raw_us = np.array([raw_ms[name] for name in steps]) * US_PER_MS

    def calibrate(
        self, parameters: tuple[str, ...], source: str, notes: tuple[str, ...]
    ) -> CalibrationResult:
        """Fit, and simulate once more with what was found."""
        if self._gaps is not None and "gap" in parameters:
            _refuse("the gap is known from the measured layers; fit factor or step_gap")
        table = self._probe()
        chosen = parameters or (() if self._gaps is not None else choose_parameters(table))
        obstacle = find_obstacle(table, chosen) if chosen else ""
        if obstacle:
            _refuse(obstacle)
        fit = fit_steps(table, chosen)
        for _ in range(_NUM_ROUNDS if fit.gap_us > 0 else 0):
            table = self._table(fit.gap_us)
            fit = fit_steps(table, chosen)
        calibration = self._calibration(fit, source)
        corrected_us = self._step_us(calibration)
        left_out_us = leave_one_out(table, chosen) if chosen else None
        error_ratio = mean_error(self._measured_us, corrected_us)
        return CalibrationResult(
            calibration=replace(calibration, num_steps=len(self._names), error_ratio=error_ratio),
            parameters=chosen,
            steps=tuple(self._compare(corrected_us, left_out_us)),
            raw_error_ratio=mean_error(self._measured_us, self._raw_us),
            calibrated_error_ratio=error_ratio,
            left_out_error_ratio=(
                -1.0 if left_out_us is None else mean_error(self._measured_us, left_out_us)
            ),
            notes=(*notes, *self._describe(table, chosen, fit)),
        )

    def _probe(self) -> StepTable:
        """Return the steps with what the least gap that shows adds."""
        for gap_us in _PROBES_US:
            table = self._table(gap_us)
            if self._gaps is not None or np.any(table.sensitivity):
                break
        return table

    def _table(self, gap_us: float) -> StepTable:
        """Return the steps with what a gap of this size adds, per µs of it."""
        start_us = self._step_us(self._gaps) if self._gaps is not None else self._raw_us
        if self._gaps is not None:
            sensitivity = np.zeros(len(self._names))
        else:
            with_gap = self._calibration(StepFit(gap_us=gap_us), "")
            sensitivity = (self._step_us(with_gap) - start_us) / gap_us
        return StepTable(measured_us=self._measured_us, raw_us=start_us, sensitivity=sensitivity)

    def _calibration(self, fit: StepFit, source: str) -> TrainingCalibration:
        gaps = self._gaps or TrainingCalibration(
            forward_gap_us=fit.gap_us * (1 - _BACKWARD_SHARE),
            backward_gap_us=fit.gap_us * _BACKWARD_SHARE,
        )
        return replace(gaps, source=source, step_gap_us=fit.step_gap_us, step_factor=fit.factor)

    def _step_us(self, calibration: TrainingCalibration) -> Floats:
        times_ms = [
            _simulate(
                self._simulate, name, replace(self._runs[name], calibration=calibration)
            ).step_time_ms
            for name in self._names
        ]
        return np.array(times_ms) * US_PER_MS

    def _compare(
        self, corrected_us: Floats, left_out_us: Floats | None
    ) -> Iterator[CalibratedStep]:
        for place, name in enumerate(self._names):
            yield CalibratedStep(
                name=name,
                measured_ms=float(self._measured_us[place]) / US_PER_MS,
                raw_ms=float(self._raw_us[place]) / US_PER_MS,
                calibrated_ms=float(corrected_us[place]) / US_PER_MS,
                left_out_ms=0.0 if left_out_us is None else float(left_out_us[place]) / US_PER_MS,
            )

    def _describe(self, table: StepTable, chosen: Sequence[str], fit: StepFit) -> Iterator[str]:
        if self._gaps is None and not chosen:
            yield (
                "no correction predicts steps left out better than the simulation as it is, so"
                " there is none; name what to fit to have it all the same"
            )
        if len(self._names) == 1 and chosen:
            yield "one step cannot tell a gap from a factor: this is one of several corrections"
        if "gap" in chosen and not fit.gap_us:
            yield "no gap makes these steps shorter: simulated ones are as slow as measured ones"
        if "gap" in chosen and fit.gap_us:
            yield (
                "steps tell the sum of the forward and the backward gap only; they are split"
                " 1 to 2. Measure encoder_fwd and encoder_bwd to know each"
            )
        if self._gaps is None:
            for name in PARAMETERS:
                wanted = (*chosen, name)
                if name not in chosen and (reason := find_obstacle(table, wanted)):
                    yield f"{name} is not fitted: {reason}"


def _sort_times(
    runs: Mapping[str, TrainingScenario], measured: Sequence[MeasuredTime]
) -> tuple[dict[str, dict[tuple[str, int], float]], tuple[str, ...]]:
    """Return times by scenario, component and stage, repeated ones as their median; and notes."""
    by_run: dict[str, dict[tuple[str, int], list[float]]] = {}
    num_flagged = 0
    for time in measured:
        if time.flags:
            num_flagged += 1
            continue
        name = time.scenario or (next(iter(runs)) if len(runs) == 1 else "")
        if name not in runs:
            _refuse(
                f"{time.scenario!r} is none of the scenarios; there are {', '.join(sorted(runs))}:"
                " give its file too, or leave its rows out"
                if time.scenario
                else "a time does not say of which scenario it is"
            )
        times = by_run.setdefault(name, {})
        # A step is of all stages, whichever of them reported it.
        stage = -1 if time.component == STEP else time.stage
        times.setdefault((time.component, stage), []).append(time.time_ms)
    found = {
        name: {key: statistics.median(values) for key, values in times.items()}
        for name, times in by_run.items()
    }
    known = {STEP, *LAYER_COMPONENTS}
    others = sorted({key[0] for times in found.values() for key in times} - known)
    notes = []
    if num_flagged:
        notes.append(f"flagged times are not used: {num_flagged}")
    if others:
        notes.append(f"not used, as only steps and layers are fitted to: {', '.join(others)}")
    return found, tuple(notes)


def _describe_gaps(gaps: TrainingCalibration | None) -> Iterator[str]:
    if gaps is None:
        return
    found = (gaps.forward_gap_us, gaps.backward_gap_us)
    for component, gap_us in zip(LAYER_COMPONENTS, found, strict=True):
        if not gap_us:
            yield f"{component} is simulated to be as slow as it was measured: it has no gap"


def _pairs(
    name: str, times: Mapping[tuple[str, int], float], report: TrainingReport
) -> Iterator[ComponentPair]:
    """Yield the measured layers of a run with the simulated ones."""
    for (component, stage), time_ms in times.items():
        if component not in LAYER_COMPONENTS:
            continue
        simulated = [
            item.time_ms
            for item in report.components
            if item.name == component and stage in (-1, item.stage)
        ]
        if not simulated:
            _refuse(f"{name} has no {component} in stage {stage}")
        yield ComponentPair(
            component=component,
            measured_us=time_ms * US_PER_MS,
            simulated_us=statistics.mean(simulated) * US_PER_MS,
            name=name if stage < 0 else f"{name}, stage {stage}",
        )


def _simulate(simulate: Simulate, name: str, scenario: TrainingScenario) -> TrainingReport:
    """Return the report of a run; one beyond the device's memory has its times, too."""
    report = simulate(scenario)
    if not report.step_time_ms:
        _refuse(f"{name} cannot be simulated: {report.feasibility.reason}")
    return report


def _refuse(reason: str) -> NoReturn:
    raise InvalidRequestError.of_field("measured", reason)
