"""The runs that are compared: their names, figures, what differs, and how sure that is."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.metric import Figure
from foretoken.domain.metrics.registry import list_figures, shown_at
from foretoken.domain.requests.search import CapacityReport, ServingSearchReport
from foretoken.domain.requests.training_run import TrainingRunReport
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.results.report import ServingReport
from foretoken.domain.results.result import AnyReport, KeptResult
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.report.search_candidates import list_rows, ranked_rows

# As many as there are colours that can be distinguished.
MAX_RUNS = 6
_FEWEST = 2
# Names are made of so many differences, and of so many letters at most.
_MAX_DIFFERENCES = 2
_MAX_LETTERS = 40
# How much was computed says little of what was asked.
_UNTOLD = frozenset(("num_finalists", "num_curves", "max_candidates", "has_sensitivity"))
_KIND_NAMES = {
    "serving": "a simulated deployment",
    "training": "a training step",
    "training-run": "a whole training run",
    "capacity": "a capacity",
    "serving-search": "a search for a deployment",
    "training-search": "a search for a training strategy",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A key of which not all runs have the same value; `values` as text, one per run."""

    path: str
    values: tuple[str, ...]


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
        words, letter = shorten(words, _MAX_LETTERS), ascii_uppercase[place]
        runs.append(ComparedRun(letter=letter, words=words, result=result, report=report))
    return tuple(runs)


def shorten(text: str, most: int) -> str:
    """Return a text of so many letters at most."""
    return text if len(text) <= most else text[: most - 1] + "…"


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
    ranked = (ranked_rows(list_rows(report.candidates)) for report in reports)
    rows = [next(iter(found), None) for found in ranked]
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


# Longer lists, such as the requests of a trace, are shown by their length and content.
_MAX_ENTRIES = 16
_DIGEST = 6
# What a configuration has not.
ABSENT = "-"
# The keys of a model follow from its name.
_MODEL, _MODEL_NAME = "model.", "model.name"


def list_changes(configurations: Sequence[str]) -> tuple[Change, ...]:
    """Return what differs between configurations (JSON), in the order of their keys.

    Of models with different names the name alone is shown, which stands for all that they are.
    """
    flat = [dict(_flatten(json.loads(text) if text else {}, "")) for text in configurations]
    paths = dict.fromkeys(path for entries in flat for path in entries)
    changes = [
        Change(path=path, values=tuple(entries.get(path, ABSENT) for entries in flat))
        for path in paths
    ]
    differing = [change for change in changes if len(set(change.values)) > 1]
    is_renamed = any(_is_model_name(change.path) for change in differing)
    return tuple(
        change
        for change in differing
        if not is_renamed or _is_model_name(change.path) or _MODEL not in f".{change.path}"
    )


def _is_model_name(path: str) -> bool:
    return path == _MODEL_NAME or path.endswith(f".{_MODEL_NAME}")


def _flatten(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        if len(value) > _MAX_ENTRIES:
            yield path, _digest(value)
            return
        for place, item in enumerate(value):
            yield from _flatten(item, f"{path}.{place}")
    else:
        yield path, _describe(value)


def _digest(value: list[Any]) -> str:
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return f"{len(value):,} entries, {digest[:_DIGEST]}"


def _describe(value: Any) -> str:
    """Return a value as a scenario file would have it; nothing where it is empty."""
    if value is None or value in ("", [], {}):
        return ABSENT
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        short = len(value) <= _MAX_ENTRIES
        return ", ".join(map(_describe, value)) if short else _digest(value)
    return f"{value:.10g}" if isinstance(value, float) else str(value)


# What says how many tokens a training step has.
_BATCH = frozenset(("global_batch_size", "global_batch_sizes", "sequence_length"))


def list_warnings(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield what makes a comparison void, in whole or in part, in sentences."""
    for run in runs:
        # Of a search only its candidates may be impossible.
        if isinstance(run.report, ServingSearchReport | TrainingSearchReport):
            continue
        if not run.report.feasibility.is_feasible:
            yield f"{run.letter} cannot run: {run.report.feasibility.reason}."
    versions = {run.report.model_version or "no trained model" for run in runs}
    if len(versions) > 1:
        words = ", ".join(
            f"{run.letter} by {run.report.model_version or 'no trained model'}" for run in runs
        )
        yield (
            f"The estimates are of different versions of the predictor ({words}): part of what"
            " differs may be theirs."
        )


def list_remarks(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield how sure a comparison is, in sentences."""
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


_BOUNDS = {
    TrainingReport: ("step_time_low_ms", "step_time_high_ms"),
    TrainingRunReport: ("days_low", "days_high"),
    CapacityReport: ("low_rps", "high_rps"),
}


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
    low, high = _BOUNDS.get(type(report), ("", ""))
    return (getattr(report, low), getattr(report, high)) if high and getattr(report, high) else None


def list_echoes(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the question of every run, and what its answer rests on."""
    return [line for run in runs for line in run.report.echo.lines(run.letter)]
