"""The pictures of several searches side by side: fronts, the best of each, changes of rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.page.figure import SERIES
from foretoken.page.section import DataTable, Picture, Section
from foretoken.simulator.report.compare_finalists import simulated_pictures
from foretoken.simulator.report.rank_plot import draw_ranks
from foretoken.simulator.report.scatter_plot import Mark, Scatter, draw_scatter
from foretoken.simulator.report.search_candidates import (
    Row,
    candidate_rows,
    describe_rank,
    describe_verdict,
)
from foretoken.simulator.report.training_search_rows import strategy_rows

SearchReport = ServingSearchReport | TrainingSearchReport
Reports = Mapping[str, SearchReport]
_Value = Callable[[Row], float]

# So many of the best of every search are in tables.
_NUM_BEST = 10
# More points of a search than this make a page slow to open; the rest are left out evenly.
_MAX_MARKS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class _Front:
    """A plane, and the column that says which candidates are on its front."""

    slug: str
    title: str
    x_label: str
    y_label: str
    x: _Value
    y: _Value
    column: str
    caption: str
    is_near: bool = False
    may_be_log: bool = False


def _column(name: str) -> _Value:
    return lambda row: float(row[name])


_SERVING_FRONTS = (
    _Front(
        slug="compare-user",
        title="Throughput of a GPU against speed for a user",
        x_label=f"{METRICS['tps_per_user'].label} (1000 / TPOT in ms)",
        y_label=METRICS["output_throughput_tps_per_gpu"].title,
        x=_column("tps_per_user"),
        y=_column("output_throughput_tps_per_gpu"),
        column="is_pareto_user",
        caption="Up and to the right is better.",
    ),
    _Front(
        slug="compare-cost",
        title="Cost against latency",
        x_label=METRICS["tpot_ms"].title,
        y_label=METRICS["usd_per_million_output_tokens"].title,
        x=_column("tpot_ms"),
        y=_column("usd_per_million_output_tokens"),
        column="is_pareto_cost",
        caption="Down and to the left is better. The price is that of the devices alone.",
        may_be_log=True,
    ),
)
_TRAINING_FRONTS = (
    _Front(
        slug="compare-memory",
        title="Throughput against free memory",
        x_label=METRICS["margin_bytes"].title,
        y_label=METRICS["tokens_per_s_per_gpu"].title,
        x=METRICS["margin_bytes"].value,
        y=_column("tokens_per_s_per_gpu"),
        column="is_pareto_memory",
        caption="Up and to the right is better: more tokens, and more room.",
        is_near=True,
    ),
    _Front(
        slug="compare-cost",
        title="Throughput of the cluster against cost",
        x_label=METRICS["usd_per_billion_tokens"].title,
        y_label=METRICS["tokens_per_s"].title,
        x=_column("usd_per_billion_tokens"),
        y=_column("tokens_per_s"),
        column="is_pareto_cost",
        caption="Up and to the left is better. The price is that of the devices alone.",
        is_near=True,
    ),
)
_PRICES = ("usd_per_million_output_tokens", "usd_per_billion_tokens")


def search_pictures(reports: Reports) -> list[Section]:
    """Return the fronts of searches of one kind, by label, their best, and what changed rank."""
    rows: Mapping[str, Sequence[Row]] = {label: _rows(report) for label, report in reports.items()}
    is_serving = isinstance(next(iter(reports.values())), ServingSearchReport)
    rows = rows if is_serving else name_alike(rows)
    ranked = {label: _rank(found) for label, found in rows.items()}
    fronts = _SERVING_FRONTS if is_serving else _TRAINING_FRONTS
    throughput = "output_throughput_tps_per_gpu" if is_serving else "tokens_per_s_per_gpu"
    return [
        Section(
            title="Pareto fronts",
            intro="Every point is a candidate that qualifies, in the colour of its search; large"
            " ones are on the front of their search, through which the line goes.",
            pictures=list(_pictures(ranked, fronts)),
        ),
        _best(rows, ranked, throughput),
        *_changes(ranked),
        *simulated_pictures(reports),
    ]


def _rows(report: SearchReport) -> list[Row]:
    if isinstance(report, ServingSearchReport):
        return candidate_rows(report.candidates)
    return strategy_rows(report.candidates)


def _rank(rows: Sequence[Row]) -> list[Row]:
    return sorted((row for row in rows if row["rank"] > 0), key=lambda row: row["rank"])


def _pictures(ranked: Mapping[str, Sequence[Row]], fronts: Sequence[_Front]) -> Iterator[Picture]:
    for front in fronts:
        shown = {label: _with_price(rows, front) for label, rows in ranked.items()}
        if not any(shown.values()):
            continue
        marks, lines, legend = [], [], []
        for (label, rows), color in zip(shown.items(), SERIES, strict=False):
            on_front = [row for row in rows if row[front.column]]
            marks += [_mark(row, rows, front, (label, color)) for row in _thin(rows, front)]
            if on_front:
                lines.append((color, [(front.x(row), front.y(row)) for row in on_front]))
            legend.append((label, color))
        plot = Scatter(
            title=front.title,
            x_label=front.x_label,
            y_label=front.y_label,
            marks=marks,
            legend=legend,
            lines=lines,
            is_near=front.is_near,
            may_be_log=front.may_be_log,
            hint="Point at a mark, or tap it, for its details.",
        )
        yield Picture(svg=draw_scatter(front.slug, plot), caption=front.caption)


def _with_price(rows: Sequence[Row], front: _Front) -> list[Row]:
    """Return the rows that can be drawn; of a front of cost those with a price."""
    if front.column != "is_pareto_cost":
        return list(rows)
    return [row for row in rows if any(row.get(price, 0) > 0 for price in _PRICES)]


def _thin(rows: Sequence[Row], front: _Front) -> list[Row]:
    others = [row for row in rows if not row[front.column]]
    step = -(-len(others) // _MAX_MARKS) or 1
    return [*others[::step], *(row for row in rows if row[front.column])]


def _mark(row: Row, rows: Sequence[Row], front: _Front, search: tuple[str, str]) -> Mark:
    label, color = search
    figures = f"{front.y_label} {format_number(front.y(row))}, {front.x_label}"
    return Mark(
        x=front.x(row),
        y=front.y(row),
        color=color,
        weight="strong" if row[front.column] else "faint",
        details=[
            f"{label}, rank {describe_rank(row, rows)}: {row['name']}",
            f"{figures} {format_number(front.x(row))}",
        ],
    )


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
            format_number(row[throughput]) if row is not None and row["rank"] > 0 else "-"
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
            " not among the best, or not in its space."
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


def _changes(ranked: Mapping[str, Sequence[Row]]) -> list[Section]:
    """Return the picture of how the best that all searches rank have moved, if there are two."""
    ranks = [{row["name"]: int(row["rank"]) for row in rows} for rows in ranked.values()]
    common = [name for name in _best_names(ranked) if all(name in of_one for of_one in ranks)]
    if len(common) <= 1:
        return []
    svg = draw_ranks(
        "compare-ranks",
        "Ranks of the best that all searches rank",
        [label.partition(":")[0] for label in ranked],
        {name: [of_one[name] for of_one in ranks] for name in common},
    )
    num_all = len(set.intersection(*(set(of_one) for of_one in ranks)))
    caption = (
        f"{num_all:,} candidates are ranked by all; drawn are those among the {_NUM_BEST} best of"
        " one, one below the other. Green ones climb past others, vermilion ones fall. Ties have"
        " equal ranks."
    )
    return [Section(title="What changed rank", pictures=[Picture(svg=svg, caption=caption)])]


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
