"""What to know before figures of several runs are compared."""

from collections.abc import Iterator, Sequence

from foretoken.domain.report import ServingReport
from foretoken.domain.search import CapacityReport
from foretoken.domain.training_report import TrainingReport
from foretoken.simulator.report.compare_changes import list_changes
from foretoken.simulator.report.compare_runs import ComparedRun, configuration_of


def list_warnings(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """Return what makes a comparison void, in whole or in part, in sentences."""
    return tuple(_warnings(runs))


def list_remarks(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """Return how sure a comparison is, in sentences."""
    return tuple(_remarks(runs))


def _warnings(runs: Sequence[ComparedRun]) -> Iterator[str]:
    for run in runs:
        report = run.report
        if isinstance(report, TrainingReport | ServingReport | CapacityReport) and (
            not report.feasibility.is_feasible
        ):
            yield f"{run.letter} cannot run: {report.feasibility.reason}."
    versions = {run.report.model_version or "no trained model" for run in runs}
    if len(versions) > 1:
        words = ", ".join(
            f"{run.letter} by {run.report.model_version or 'no trained model'}" for run in runs
        )
        yield (
            f"The estimates are of different versions of the predictor ({words}): part of what"
            " differs may be theirs."
        )


def _remarks(runs: Sequence[ComparedRun]) -> Iterator[str]:
    if not list_changes([configuration_of(run.report) for run in runs]):
        yield "The configurations are the same."
    pairs = [(run, bounds) for run in runs if (bounds := _bounds(run)) is not None]
    if not pairs:
        return
    (first, (low, high)), *others = pairs
    overlapping = [
        run.letter
        for run, (other_low, other_high) in others
        if low <= other_high and other_low <= high
    ]
    if overlapping:
        yield (
            f"The interval of {first.letter} overlaps with that of {', '.join(overlapping)}. Where"
            " runs have the same operators they have the same errors, so ratios are surer than the"
            " figures; where they have not, the order could turn."
        )


def _bounds(run: ComparedRun) -> tuple[float, float] | None:
    """Return the bounds of what a run is judged by, where it has any."""
    report = run.report
    if isinstance(report, TrainingReport) and report.step_time_high_ms > 0:
        return report.step_time_low_ms, report.step_time_high_ms
    if isinstance(report, CapacityReport) and report.high_rps > 0:
        return report.low_rps, report.high_rps
    return None
