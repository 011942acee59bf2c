"""What to know before figures of several runs are compared."""

from collections.abc import Iterator, Sequence

from foretoken.domain.report import ServingReport
from foretoken.domain.search import CapacityReport
from foretoken.domain.training_report import TrainingReport
from foretoken.domain.training_run import TrainingRunReport
from foretoken.domain.training_search import TrainingSearchReport
from foretoken.simulator.report.compare_changes import list_changes
from foretoken.simulator.report.compare_runs import ComparedRun, configuration_of

# What may be impossible as a whole; of a search only its candidates may.
_JUDGED = (TrainingReport, TrainingRunReport, ServingReport, CapacityReport)

# What says how many tokens a training step has.
_BATCH = frozenset(("global_batch_size", "global_batch_sizes", "sequence_length"))


def list_warnings(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """Return what makes a comparison void, in whole or in part, in sentences."""
    return tuple(_warnings(runs))


def list_remarks(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    """Return how sure a comparison is, in sentences."""
    return tuple(_remarks(runs))


def _warnings(runs: Sequence[ComparedRun]) -> Iterator[str]:
    for run in runs:
        report = run.report
        if isinstance(report, _JUDGED) and not report.feasibility.is_feasible:
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
    changes = list_changes([configuration_of(run.report) for run in runs])
    if not changes:
        yield "The configurations are the same."
    if any(change.path.rpartition(".")[2] in _BATCH for change in changes):
        yield "Steps differ in their tokens: compare by tokens/s, not by the time of a step."
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
    """Return the bounds of what a run is judged by, where it has any.

    Of a search for a strategy: those of the tokens/s per device of its best, where simulated.
    """
    report = run.report
    if isinstance(report, TrainingSearchReport):
        ranked = [finalist for finalist in report.finalists if finalist.rank > 0]
        best = min(ranked, key=lambda finalist: finalist.rank, default=None)
        if best is None or best.report.step_time_low_ms <= 0:
            return None
        step = best.report
        tokens_in_step = step.tokens_per_s_per_gpu * step.step_time_ms
        return tokens_in_step / step.step_time_high_ms, tokens_in_step / step.step_time_low_ms
    if isinstance(report, TrainingReport) and report.step_time_high_ms > 0:
        return report.step_time_low_ms, report.step_time_high_ms
    if isinstance(report, TrainingRunReport) and report.days_high > 0:
        return report.days_low, report.days_high
    if isinstance(report, CapacityReport) and report.high_rps > 0:
        return report.low_rps, report.high_rps
    return None


def list_echoes(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the question of every run, and what its answer rests on."""
    return [line for run in runs for line in run.report.echo.lines(run.letter)]
