"""The runs that are compared: alike in kind, each with a letter and a short name."""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.metric import Figure
from foretoken.domain.metrics.registry import list_figures, shown_at
from foretoken.domain.report import ServingReport
from foretoken.domain.result import AnyReport, KeptResult
from foretoken.domain.search import CapacityReport, ServingSearchReport
from foretoken.domain.training_report import TrainingReport
from foretoken.domain.training_search import TrainingSearchReport
from foretoken.simulator.report.compare_changes import ABSENT, Change, list_changes
from foretoken.simulator.report.search_candidates import Row, list_rows

# As many as there are colours that can be told apart.
MAX_RUNS = 6
_FEWEST = 2
# Names are made of so many differences, and of so many letters at most.
_MAX_DIFFERENCES = 2
_MAX_LETTERS = 40
# How much was computed says little of what was asked.
_UNTOLD = frozenset(("num_finalists", "max_candidates", "has_sensitivity"))
_KIND_NAMES = {
    "serving": "a simulated deployment",
    "training": "a training step",
    "training-run": "a whole training run",
    "capacity": "a capacity",
    "serving-search": "a search for a deployment",
    "training-search": "a search for a training strategy",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """A run with its letter and what tells it from the others."""

    letter: str
    words: str
    result: KeptResult
    report: AnyReport

    @property
    def label(self) -> str:
        """What tables and pictures call it."""
        return f"{self.letter}: {self.words}"


def name_runs(results: Sequence[tuple[KeptResult, AnyReport]]) -> tuple[ComparedRun, ...]:
    """Return the runs with letters, and words from what differs in their configurations.

    Raises:
        InvalidRequestError: they are of different kinds, one alone, or too many.

    """
    _check([result for result, _ in results])
    changes = list_changes([configuration_of(report) for _, report in results])
    titles = [result.title for result, _ in results]
    runs = []
    for place, (result, report) in enumerate(results):
        words = _words(place, changes) or (
            titles[place] if len(set(titles)) == len(titles) else result.job_id
        )
        if len(words) > _MAX_LETTERS:
            words = words[: _MAX_LETTERS - 1] + "…"
        letter = ascii_uppercase[place]
        runs.append(ComparedRun(letter=letter, words=words, result=result, report=report))
    return tuple(runs)


def compare_figures(reports: Sequence[AnyReport]) -> tuple[Figure, ...]:
    """Return the figures of reports of one kind, without those that are 0 in all of them.

    Of searches those of the best come first, of capacities those of the run at it last.
    """
    found = list_figures("comparison", [report if _can_run(report) else None for report in reports])
    searches = [r for r in reports if isinstance(r, ServingSearchReport | TrainingSearchReport)]
    if searches:
        found = [*_figures_of_best(searches), *found]
    capacities = [report for report in reports if isinstance(report, CapacityReport)]
    if capacities:
        # A capacity has these itself.
        without = {metric.name for metric in shown_at("comparison", capacities[0])}
        runs = [report.at_capacity if _can_run(report) else None for report in capacities]
        found += list_figures(
            "comparison", runs, prefix="at capacity: ", without={*without, "offered_rps"}
        )
    return tuple(figure for figure in found if any(figure.values))


def _can_run(report: AnyReport) -> bool:
    """Whether a report is of what can run; of a search its candidates say."""
    return isinstance(report, ServingSearchReport | TrainingSearchReport) or (
        report.feasibility.is_feasible
    )


def _figures_of_best(
    reports: Sequence[ServingSearchReport | TrainingSearchReport],
) -> list[Figure]:
    """Return the figures of the candidate that each search ranks first; None where none does."""
    rows = [_best_row(report) for report in reports]
    first = next((row for row in rows if row is not None), None)
    if first is None:
        return []
    return [
        Figure(
            label=f"best: {metric.label}",
            metric=metric,
            values=tuple(None if row is None else metric.value(row) for row in rows),
        )
        for metric in shown_at("ranking", first)
    ]


def _best_row(report: ServingSearchReport | TrainingSearchReport) -> Row | None:
    ranked = [row for row in list_rows(report.candidates, ("name",)) if row["rank"] > 0]
    return min(ranked, key=lambda row: row["rank"], default=None)


def configuration_of(report: AnyReport) -> str:
    """Return what a report answers, resolved, as JSON: its scenario or its request."""
    if isinstance(report, ServingReport | TrainingReport | CapacityReport):
        return report.scenario_json
    return report.request_json


def _check(results: Sequence[KeptResult]) -> None:
    if not _FEWEST <= len(results) <= MAX_RUNS:
        raise InvalidRequestError(f"give {_FEWEST} to {MAX_RUNS} results, not {len(results)}")
    kinds = {result.kind: result for result in results}
    if len(kinds) > 1:
        words = ", ".join(
            f"{result.job_id} is {_KIND_NAMES.get(kind, kind)}" for kind, result in kinds.items()
        )
        raise InvalidRequestError(
            f"results of different kinds cannot be compared: {words}; `foretoken results list"
            f" --kind {results[0].kind}` has those like the first"
        )


def _words(place: int, changes: Sequence[Change]) -> str:
    """Return the values of the few keys that differ: `pp 4, tp 2`; nothing where they are many."""
    # Of keys that differ alike, such as the device of a scenario and of its space, one does.
    alike: dict[tuple[str, ...], Change] = {}
    for change in changes:
        if change.path not in _UNTOLD:
            alike.setdefault(change.values, change)
    if not 0 < len(alike) <= _MAX_DIFFERENCES:
        return ""
    return ", ".join(
        f"{change.path.rpartition('.')[2].replace('_', ' ')}"
        f" {'none' if change.values[place] == ABSENT else change.values[place]}"
        for change in alike.values()
    )
