"""The sections of a page that sets several runs side by side: tables, and charts of searches."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import log
from typing import TypeVar

from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.search import Finalist, ServingSearchReport
from foretoken.domain.requests.training_search import StrategyFinalist, TrainingSearchReport
from foretoken.page.block import Column, Table
from foretoken.page.section import Section
from foretoken.simulator import comparison
from foretoken.simulator.report import fronts
from foretoken.simulator.report.search_candidates import (
    Row,
    candidate_rows,
    describe_verdict,
    explain_names,
    ranked_rows,
)
from foretoken.simulator.report.search_finalists import finalist_sections
from foretoken.simulator.report.training_search_rows import report_rows
from foretoken.simulator.report.training_search_sections import finalists_section

# Longer values of a configuration are cut.
_MAX_LETTERS = 80


def compare_tables(runs: Sequence[comparison.ComparedRun]) -> list[Section]:
    """Return the runs, what differs in what was asked and in what came of it."""
    return [_overview(runs), _changes(runs), _figures(runs)]


def _overview(runs: Sequence[comparison.ComparedRun]) -> Section:
    table = Table.of(
        runs,
        Column.words("run", "label"),
        Column.words("answer", "headline").part("result"),
        Column.words("of", "title").part("result"),
        Column.words(
            "at (UTC)", read=lambda run: run.result.created_at.partition(".")[0].replace("T", " ")
        ),
        Column.words("predictor", read=lambda run: run.report.model_version or "no trained model"),
        Column.words("job", "job_id").part("result"),
    )
    intro = " ".join(comparison.list_remarks(runs))
    return Section(
        title="Runs", warning=" ".join(comparison.list_warnings(runs)), intro=intro, table=table
    )


def _changes(runs: Sequence[comparison.ComparedRun]) -> Section:
    changes = comparison.list_changes([comparison.configuration_of(run.report) for run in runs])
    rows = [
        (change.path, *(comparison.shorten(value, _MAX_LETTERS) for value in change.values))
        for change in changes
    ]
    headers = ("key", *(run.letter for run in runs))
    return Section(
        title="What differs in the configurations",
        intro=(
            "Keys of the resolved configurations, a dash where one is absent. A model of another"
            " name is one difference."
            if rows
            else "Nothing."
        ),
        table=Table.listed(headers=headers, rows=rows, text_columns=range(1, len(headers)))
        if rows
        else None,
    )


def _figures(runs: Sequence[comparison.ComparedRun]) -> Section:
    figures = comparison.compare_figures([run.report for run in runs])
    first, *others = runs
    ratios = (f"{run.letter} / {first.letter}" for run in others)
    # What differs most from the first comes first, what is the same or has no ratio last.
    ordered = sorted(
        figures,
        key=lambda figure: min((-abs(log(ratio)) for ratio in figure.ratios if ratio), default=0.0),
    )
    rows = [
        (
            figure.title,
            *figure.texts(),
            *(figure.describe_ratio(place) for place in range(1, len(runs))),
        )
        for figure in ordered
    ]
    return Section(
        title="Figures",
        intro="What differs most comes first.",
        table=Table.listed(("figure", *(run.letter for run in runs), *ratios), rows),
    )


SearchReport = ServingSearchReport | TrainingSearchReport
Reports = Mapping[str, SearchReport]

# So many of the best of every search are in tables.
_NUM_BEST = 10
# More points of a search than this make a page slow to open; the rest are left out evenly.
_MAX_POINTS = 1000
_BATCH = "global_batch_size"
_Finalist = TypeVar("_Finalist", Finalist, StrategyFinalist)


def search_charts(reports: Reports) -> list[Section]:
    """Return the fronts of searches of one kind, by label, and their best with their ranks."""
    serving = {label: r for label, r in reports.items() if isinstance(r, ServingSearchReport)}
    training = {label: r for label, r in reports.items() if isinstance(r, TrainingSearchReport)}
    rows: Mapping[str, Sequence[Row]]
    if serving:
        of_kind, words = fronts.SERVING_FRONTS, fronts.SERVING_WORDS
        throughput = "output_throughput_tps_per_gpu"
        rows = {label: candidate_rows(report.candidates) for label, report in serving.items()}
    else:
        of_kind, words = fronts.TRAINING_FRONTS, fronts.TRAINING_WORDS
        throughput = "tokens_per_s_per_gpu"
        rows = name_alike({label: report_rows(report) for label, report in training.items()})
    ranked = {label: ranked_rows(found) for label, found in rows.items()}
    drawn = []
    for label, found in ranked.items():
        kept = {row["name"] for row in found if any(row[column] for column in of_kind)}
        drawn += [{**row, "group": label} for row in fronts.thin_rows(found, kept, _MAX_POINTS)]
    sections = [
        Section(
            title="Pareto fronts",
            intro="Every point is a candidate that qualifies, in the colour of its search; a line"
            " goes through those on the front of their search.",
            pictures=fronts.front_charts(of_kind, drawn, words),
        ),
        _best(rows, ranked, throughput),
    ]
    deployments = [
        (best, r.candidates) for label, r in serving.items() for best in _first(label, r.finalists)
    ]
    strategies = [best for label, r in training.items() for best in _first(label, r.finalists)]
    if deployments:
        sections += finalist_sections(deployments)
    return [*sections, finalists_section(strategies)] if strategies else sections


def _best(
    rows: Mapping[str, Sequence[Row]], ranked: Mapping[str, Sequence[Row]], throughput: str
) -> Section:
    """Return the best of every search, with their ranks and throughput in all of them."""
    best = (row["name"] for found in ranked.values() for row in found[:_NUM_BEST])
    names = list(dict.fromkeys(best))
    by_name = {label: {row["name"]: row for row in found} for label, found in rows.items()}
    table = []
    for name in names:
        found = [by_name[label].get(name) for label in rows]
        ranks = [
            (row["place"] or describe_verdict(row.get("verdict", "-"))) if row else "-"
            for row in found
        ]
        values = [
            METRICS[throughput].words(row) if row is not None and row["rank"] > 0 else "-"
            for row in found
        ]
        table.append([name, *ranks, *values])
    letters = [label.partition(":")[0] for label in rows]
    headers = (
        "candidate",
        *(f"rank in {letter}" for letter in letters),
        *(f"tokens/s per GPU in {letter}" for letter in letters),
    )
    return Section(
        title="Best candidates",
        intro=(
            f"The {_NUM_BEST} best of every search. An equals sign marks ties, which the error of"
            " the estimates cannot tell apart; a dash is what a search does not list: ruled out,"
            f" not among the best, or not in its space. {explain_names(names)}"
        ),
        table=Table.listed(
            headers=headers, rows=table, text_columns=tuple(range(1, len(letters) + 1))
        ),
    )


def _first(label: str, finalists: Sequence[_Finalist]) -> list[_Finalist]:
    """Return the first of those that their simulation bears out, named by its search; or none."""
    ranked = sorted((f for f in finalists if f.rank > 0), key=lambda finalist: finalist.rank)
    return [replace(best, name=f"{label.partition(':')[0]}: {best.name}") for best in ranked[:1]]


def name_alike(rows: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Return the rows of every search with names that tell the same of the cluster and the batch.

    A search names a device, a number of devices or a batch only where it varies them. What one
    search names, all do here.
    """
    axes = {
        axis
        for found in rows.values()
        for row in found
        for axis, word in _words(row).items()
        if f" {word} " in f" {row['name']} "
    }
    return {
        label: [{**row, "name": _tell(row, axes)} for row in found] for label, found in rows.items()
    }


def _words(row: Row) -> dict[str, str]:
    """Return how a name tells each of what it may leave out; placed stages have no device."""
    device = {} if row["placement"] else {"device": str(row["device"])}
    num_devices = f"{row['num_devices']:.0f} devices"
    return {**device, "num_devices": num_devices, _BATCH: f"gbs{row[_BATCH]:.0f}"}


def _tell(row: Row, axes: Collection[str]) -> str:
    words, name = _words(row), f" {row['name']} "
    for word in words.values():
        name = name.replace(f" {word} ", " ", 1)
    if _BATCH in axes:
        name = re.sub(r" mbs\S+", rf"\g<0> {words[_BATCH]}", name)
    first = [word for axis, word in words.items() if axis in axes and axis != _BATCH]
    return " ".join([*first, name.strip()])
