"""The charts of several searches next to each other: fronts, the best of each, ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.results.training_report import TrainingReport
from foretoken.page.block import Chart, Column
from foretoken.page.section import DataTable, Section
from foretoken.simulator.report import search_fronts, training_search_fronts
from foretoken.simulator.report.fronts import Front, Looks, front_chart
from foretoken.simulator.report.notation import explain_names
from foretoken.simulator.report.palette import groups_chart
from foretoken.simulator.report.search_candidates import (
    Row,
    candidate_rows,
    describe_rank,
    describe_verdict,
)
from foretoken.simulator.report.training_search_rows import strategy_rows

SearchReport = ServingSearchReport | TrainingSearchReport
Reports = Mapping[str, SearchReport]

# So many of the best of every search are in tables.
_NUM_BEST = 10
# More points of a search than this make a page slow to open; the rest are left out evenly.
_MAX_POINTS = 1000
_SEARCH = "_search"


def search_charts(reports: Reports) -> list[Section]:
    """Return the fronts of searches of one kind, by label, and their best with their ranks."""
    rows: Mapping[str, Sequence[Row]] = {label: _rows(report) for label, report in reports.items()}
    is_serving = isinstance(next(iter(reports.values())), ServingSearchReport)
    rows = rows if is_serving else name_alike(rows)
    ranked = {label: _rank(found) for label, found in rows.items()}
    throughput = "output_throughput_tps_per_gpu" if is_serving else "tokens_per_s_per_gpu"
    fronts = search_fronts if is_serving else training_search_fronts
    both = (
        (search_fronts.USER, fronts.COST)
        if is_serving
        else (training_search_fronts.MEMORY, fronts.COST)
    )
    charts = [chart for front in both if (chart := _front(front, ranked))]
    return [
        Section(
            title="Pareto fronts",
            intro="Every point is a candidate that qualifies, in the colour of its search; a line"
            " goes through those on the front of their search.",
            pictures=charts,
        ),
        _best(rows, ranked, throughput),
        *_simulated(reports),
    ]


def _rows(report: SearchReport) -> list[Row]:
    if isinstance(report, ServingSearchReport):
        return candidate_rows(report.candidates)
    return strategy_rows(report.candidates)


def _rank(rows: Sequence[Row]) -> list[Row]:
    return sorted((row for row in rows if row["rank"] > 0), key=lambda row: row["rank"])


def _front(front: Front, ranked: Mapping[str, Sequence[Row]]) -> Chart | None:
    """Return the chart of a front of all searches; None where nothing has its metrics."""
    drawn = [
        {**row, _SEARCH: label}
        for label, rows in ranked.items()
        for row in _thin([row for row in rows if row[front.x] > 0 and row[front.y] > 0], front)
    ]
    if not drawn:
        return None
    looks = Looks(
        group=lambda row: str(row[_SEARCH]),
        words={"rank": lambda row: describe_rank(row, ranked[row[_SEARCH]])},
        labels={},
        is_line_by_group=True,
    )
    return front_chart(replace(front, bounds=None), drawn, looks)


def _thin(rows: Sequence[Row], front: Front) -> list[Row]:
    others = [row for row in rows if not row[front.column]]
    step = -(-len(others) // _MAX_POINTS) or 1
    return [*others[::step], *(row for row in rows if row[front.column])]


def _best(
    rows: Mapping[str, Sequence[Row]], ranked: Mapping[str, Sequence[Row]], throughput: str
) -> Section:
    """Return the best of every search, with their ranks and throughput in all of them."""
    names = _best_names(ranked)
    by_name = {label: {row["name"]: row for row in found} for label, found in rows.items()}
    table = []
    for name in names:
        found = [by_name[label].get(name) for label in rows]
        ranks = [_describe_rank(row, ranked[label]) for label, row in zip(rows, found, strict=True)]
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
        table=DataTable(
            headers=headers, rows=table, text_columns=tuple(range(1, len(letters) + 1))
        ),
    )


def _best_names(ranked: Mapping[str, Sequence[Row]]) -> list[str]:
    return list(dict.fromkeys(row["name"] for rows in ranked.values() for row in rows[:_NUM_BEST]))


def _describe_rank(row: Row | None, ranked: Sequence[Row]) -> str:
    if row is None:
        return "-"
    if row["rank"] > 0:
        return describe_rank(row, ranked)
    return describe_verdict(str(row["verdict"])) if "verdict" in row else "-"


def _simulated(reports: Reports) -> list[Section]:
    """Return where the time of the best of every search goes that was simulated."""
    shares: dict[str, Mapping[str, float]] = {}
    times_ms: dict[str, Mapping[str, float]] = {}
    for label, report in reports.items():
        ranked = [finalist for finalist in report.finalists if finalist.rank > 0]
        best = min(ranked, key=lambda finalist: finalist.rank, default=None)
        if best is None:
            continue
        name = f"{label.partition(':')[0]}: {best.name}"
        if isinstance(best.report, TrainingReport):
            times_ms[name] = best.report.step_time_ms_by_group
        else:
            times_s = best.report.step_time_s_by_group
            busy_s = sum(times_s.values()) or 1.0
            shares[name] = {group: time_s / busy_s for group, time_s in times_s.items()}
    caption = "Of the first of every search that its simulation bears out."
    share = Column(title="share of the busy time", name="share", unit=SHARE)
    charts = [
        groups_chart(title, rows, unit, caption)
        for title, rows, unit in (
            ("Critical stage, one step", times_ms, Column(title="time (ms)")),
            ("Steps of all engines", shares, share),
        )
        if rows
    ]
    return [Section(title="The best, simulated", pictures=charts)] if charts else []


def name_alike(rows: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Return the rows of every search with names that tell the same of the cluster and the batch.

    A search names a device, a number of devices or a batch only where it varies them. What one
    search names, all do here.
    """
    axes = {word for found in rows.values() for row in found for word in _named_axes(row)}
    return {
        label: [{**row, "name": _tell(row, axes)} for row in found] for label, found in rows.items()
    }


def _words(row: Row) -> dict[str, str]:
    """Return how a name tells each of what it may leave out; nothing of what has none."""
    words = {
        "device": "" if row["placement"] else str(row["device"]),
        "num_devices": f"{row['num_devices']:.0f} devices",
        "global_batch_size": f"gbs{row['global_batch_size']:.0f}",
    }
    return {axis: word for axis, word in words.items() if word}


def _named_axes(row: Row) -> set[str]:
    padded = f" {row['name']} "
    return {axis for axis, word in _words(row).items() if f" {word} " in padded}


def _tell(row: Row, axes: set[str]) -> str:
    words, name = _words(row), f" {row['name']} "
    for axis in _named_axes(row):
        name = name.replace(f" {words[axis]} ", " ", 1)
    parts = name.split()
    if "global_batch_size" in axes:
        after = next((n + 1 for n, part in enumerate(parts) if part.startswith("mbs")), len(parts))
        parts.insert(after, words["global_batch_size"])
    first = [words[axis] for axis in ("device", "num_devices") if axis in axes and axis in words]
    return " ".join([*first, *parts])
