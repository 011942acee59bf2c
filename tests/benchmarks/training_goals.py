"""Goals of predicted training steps, and which of them are met: the last lines of benchmarks."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from foretoken.domain.hardware.device import find_device
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport

# Mean error, and how far it may be too long or too short on average.
_DENSE, _DENSE_BIAS, _EXPERTS = 0.05, 0.02, 0.12
_GAIN = 0.06
_MEMORY = {"bf16": 0.03, "fp8": 0.06}
# Least share of steps inside their intervals, and the median width of these where most of a step
# rests on measurements of the device itself, and where it does not.
_INSIDE, _WIDTHS = 0.88, {"measured": 0.35, "elsewhere": 0.8}


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """A predicted step: its kind, such as "dense, fp8, hopper", and how it was judged.

    `series` names steps that differ in their number of devices alone, which have one voice.
    """

    kind: str
    series: str
    error: float
    is_inside: bool
    width: float
    fits: bool
    rests_on: str

    @classmethod
    def of_report(
        cls, scenario: TrainingScenario, report: TrainingReport, measured_s: float, series: str
    ) -> Self:
        """Judge the report of a scenario by what was measured."""
        step_s = report.step_time_ms / 1e3
        low_s, high_s = report.step_time_low_ms / 1e3, report.step_time_high_ms / 1e3
        what = "experts" if scenario.model.moe is not None else "dense"
        architecture = find_device(scenario.device).architecture
        ratios = report.step_time_ratio_by_provenance
        elsewhere = sum(ratios.get(name, 0.0) for name in ("transferred", "analytical"))
        return cls(
            kind=f"{what}, {scenario.dtype.name.lower()}, {architecture}",
            series=series,
            error=step_s / measured_s - 1,
            is_inside=low_s <= measured_s <= high_s,
            width=(high_s - low_s) / step_s,
            fits=report.feasibility.is_feasible,
            rests_on="elsewhere" if elsewhere > 0.5 else "measured",
        )


def write_goals(
    steps: Sequence[JudgedStep],
    gains: Sequence[float],
    memory: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Print every goal, what was reached, and whether it is met.

    `gains` are errors of how much faster FP8 is, `memory` those of peaks by format.
    """
    kinds = defaultdict(list)
    for step in steps:
        kinds[step.kind].append(step)
    for kind, own in sorted(kinds.items()):
        by_series = defaultdict(list)
        for step in own:
            by_series[step.series].append(step.error)
        voices = list(by_series.values())
        mean = statistics.fmean(_mean(map(abs, errors)) for errors in voices)
        bias = statistics.fmean(_mean(errors) for errors in voices)
        if kind.startswith("experts"):
            _write(f"{kind}: {_EXPERTS:.0%}", f"{mean:.1%} ({bias:+.1%})", mean <= _EXPERTS)
        else:
            goal = f"{kind}: {_DENSE:.0%}, {_DENSE_BIAS:.0%} bias"
            is_met = mean <= _DENSE and abs(bias) <= _DENSE_BIAS
            _write(goal, f"{mean:.1%} ({bias:+.1%})", is_met)
    for rests_on, most in _WIDTHS.items():
        own = [step for step in steps if step.rests_on == rests_on]
        if own:
            inside = sum(step.is_inside for step in own)
            width = statistics.median(step.width for step in own)
            is_met = inside >= _INSIDE * len(own) and width <= most
            goal = f"intervals, {rests_on}: {_INSIDE:.0%} inside, width {most}"
            _write(goal, f"{inside} of {len(own)}, {width:.2f}", is_met)
    if gains:
        mean = _mean(map(abs, gains))
        _write(f"gain of FP8, {len(gains)} pairs: {_GAIN:.0%}", f"{mean:.1%}", mean <= _GAIN)
    num_unfit = sum(not step.fits for step in steps)
    _write("runs predicted not to fit: 0", f"{num_unfit} of {len(steps)}", not num_unfit)
    for name, errors in (memory or {}).items():
        mean, most = _mean(map(abs, errors)), _MEMORY[name.rpartition(" ")[2]]
        _write(f"{name}: {most:.0%}", f"{mean:.1%} of {len(errors)}", mean <= most)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _write(goal: str, reached: str, is_met: bool) -> None:
    sys.stdout.write(f"goal {goal:56} {reached:18} {'met' if is_met else 'not met'}\n")
