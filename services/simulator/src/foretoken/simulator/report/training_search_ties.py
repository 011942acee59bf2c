"""What a search's ties mean for the choice, in words, and what would tell them apart."""

from collections.abc import Sequence

from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.training_search import StrategySensitivity, TieCall, TrainingSearchReport
from foretoken.simulator.report.search_candidates import Row
from foretoken.simulator.report.training_search_rows import (
    RankedFigure,
    find_best,
    find_ranked_figure,
    other_ties,
)

# What the commands of ties are for; a simulation may rank others first.
TO_TELL_APART = "to tell the first two by the estimates apart, measure"


def describe_ties(report: TrainingSearchReport, rows: Sequence[Row]) -> list[str]:
    """Return how many tie, and which of them to take for another reason; nothing without ties."""
    best = find_best(report, rows)
    names = set(other_ties(report, best))
    if not names:
        return []
    tied = [best, *(row for row in rows if row["name"] in names)]
    simplest = min(tied, key=lambda row: len(str(row["name"]).split()))
    roomiest = max(tied, key=METRICS["margin_bytes"].value)
    figure = find_ranked_figure(report)
    most_free = f"{METRICS['margin_bytes'].words(roomiest)} GiB"
    others = "strategies tie" if len(names) > 1 else "strategy ties"
    meaning = "behind by less than the error of the difference, so each may be as good"
    count = f"{len(names):,} other {others} with {best['name']}"
    return [
        f"{count}: {meaning}; take one for another reason, or measure",
        f"simplest of them: {_beside(simplest, best, figure)}",
        f"most free memory: {_beside(roomiest, best, figure)}, {most_free}",
    ]


def list_tie_commands(report: TrainingSearchReport) -> list[tuple[str, str]]:
    """Return what to measure to tell the first two apart: a command, and what it moves."""
    return [
        (_command(call), f"{call.difference_ratio:.2%} of the step") for call in report.tie_calls
    ]


def describe_same(item: StrategySensitivity) -> str:
    """Return what today's best makes of a change, or that it cannot be used then."""
    ratio = item.same_throughput_ratio
    if item.is_same_best:
        return "the same"
    return _percent(ratio) if ratio else "cannot"


def describe_change(item: StrategySensitivity) -> str:
    """Return what the best of a change is over the best today."""
    return _percent(item.throughput_ratio) if item.throughput_ratio else ""


def describe_best_then(item: StrategySensitivity) -> str:
    """Return what is best under a change."""
    if not item.best:
        return "nothing fits"
    return "the same" if item.is_same_best else item.best


def _percent(ratio: float) -> str:
    """Return a change in percent, without a sign of nothing."""
    return f"{round(ratio - 1, 3) + 0.0:+.1%}"


def _beside(row: Row, best: Row, figure: RankedFigure) -> str:
    if row is best:
        return f"{row['name']} itself"
    ratio = row[figure.column] / best[figure.column] - 1 if best[figure.column] else 0.0
    return f"{row['name']} ({ratio:+.2%} {figure.word})"


def _command(call: TieCall) -> str:
    links = f" --topology {call.topology}" if call.topology else ""
    return f"foretoken plan {call.operator} {call.words} --device {call.device}{links}"
