"""What to know of a training report, in words."""

from collections.abc import Sequence

from foretoken.domain.results.training_report import TrainingReport


def list_remarks(report: TrainingReport) -> Sequence[str]:
    """Return the advice where memory does not suffice, and the notes.

    What the reason against the configuration says already is left out.
    """
    advice = dict.fromkeys(stage.advice for stage in report.memory if stage.advice)
    reason = report.feasibility.reason
    return [*(text for text in advice if text not in reason), *report.notes]
