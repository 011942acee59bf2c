"""The pictures of a training search's strategies: throughput against memory and against cost."""

from collections.abc import Callable, Mapping, Sequence

from foretoken.domain.metrics.number_text import describe_step, format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.page.figure import SERIES
from foretoken.page.section import Picture, Section
from foretoken.simulator.report.scatter_plot import Mark, Scatter, draw_scatter
from foretoken.simulator.report.search_candidates import Row
from foretoken.simulator.report.training_search_rows import (
    best_of_layouts,
    describe_bounds,
    describe_choices,
    describe_devices,
    describe_place,
    throughput_bounds,
)

# More points than this are slow to open; the rest are left out evenly.
_MAX_MARKS = 600
# More layouts with a large mark than this hide each other.
_MAX_STRONG = 40


def fronts_section(rows: Sequence[Row], num_fitting: int) -> Section:
    """Return the Pareto pictures of the listed strategies; that of cost only where it is priced."""
    drawn = _drawn(rows)
    listed = (
        "all that fit"
        if len(rows) >= num_fitting
        else f"the {len(rows):,} best of {num_fitting:,} that fit"
    )
    pictures = [_memory_picture(rows, drawn)]
    if any(row["usd_per_billion_tokens"] > 0 for row in drawn):
        pictures.append(_cost_picture(rows, drawn))
    return Section(
        title="Throughput, memory and cost",
        intro=(
            f"Every point is a strategy, answered in closed form, of {listed}; {len(drawn):,} are"
            " drawn. The best of each layout is larger, with its rank; an equals sign marks ties,"
            " which the error of the estimates cannot tell apart. Axes begin near the points."
        ),
        pictures=pictures,
    )


def _memory_picture(rows: Sequence[Row], drawn: Sequence[Row]) -> Picture:
    free = METRICS["margin_bytes"]
    plot = Scatter(
        title="Throughput against free memory",
        x_label=free.title,
        y_label=METRICS["tokens_per_s_per_gpu"].title,
        is_near=True,
        marks=_marks(rows, drawn, free.value, _per_gpu, y_range=throughput_bounds),
        legend=list(_colors(rows).items()),
        front=[(free.value(row), _per_gpu(row)) for row in drawn if row["is_pareto_memory"]],
    )
    return Picture(
        svg=draw_scatter("training-memory", plot),
        caption=(
            "Up and to the right is better: more tokens, and more room for what the estimate of the"
            " memory does not know. Nothing beats those on the line in both."
        ),
    )


def _cost_picture(rows: Sequence[Row], drawn: Sequence[Row]) -> Picture:
    priced = [row for row in drawn if row["usd_per_billion_tokens"] > 0]
    plot = Scatter(
        title="Throughput of the cluster against cost",
        x_label=METRICS["usd_per_billion_tokens"].title,
        y_label=METRICS["tokens_per_s"].title,
        is_near=True,
        marks=_marks(rows, priced, _cost, _whole),
        legend=list(_colors(rows).items()),
        front=[(_cost(row), _whole(row)) for row in priced if row["is_pareto_cost"]],
    )
    return Picture(
        svg=draw_scatter("training-cost", plot),
        caption="Up and to the left is better. The price is that of the devices alone.",
    )


def _per_gpu(row: Row) -> float:
    return float(row["tokens_per_s_per_gpu"])


def _whole(row: Row) -> float:
    return float(row["tokens_per_s"])


def _cost(row: Row) -> float:
    return float(row["usd_per_billion_tokens"])


def _drawn(rows: Sequence[Row]) -> list[Row]:
    """Return the rows to draw: many are thinned out, fronts and the best of layouts kept."""
    kept = {row["name"] for row in best_of_layouts(rows)}
    kept |= {row["name"] for row in rows if row["is_pareto_cost"] or row["is_pareto_memory"]}
    others = [row["name"] for row in rows if row["name"] not in kept]
    kept |= set(others[:: -(-len(others) // _MAX_MARKS) or 1])
    return [row for row in rows if row["name"] in kept]


def _marks(
    rows: Sequence[Row],
    drawn: Sequence[Row],
    x: Callable[[Row], float],
    y: Callable[[Row], float],
    y_range: Callable[[Row], tuple[float, float]] | None = None,
) -> list[Mark]:
    strong = {row["name"] for row in best_of_layouts(rows)[:_MAX_STRONG]}
    group_of, colors = _grouping(rows), _colors(rows)
    marks = []
    for row in drawn:
        rank = describe_place(row)
        is_strong = row["name"] in strong
        marks.append(
            Mark(
                x=x(row),
                y=y(row),
                details=_details(row, rank),
                color=colors[group_of(row)],
                label=rank if is_strong else "",
                y_range=y_range(row) if y_range else None,
                weight="strong" if is_strong else "plain",
            )
        )
    return marks


def _grouping(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what colours tell apart: clusters, else devices, else nothing where these are many."""
    groupings: tuple[Callable[[Row], str], ...] = (describe_devices, lambda row: str(row["device"]))
    for grouping in groupings:
        if len({grouping(row) for row in rows}) <= len(SERIES):
            return grouping
    return lambda _: "strategies"


def _colors(rows: Sequence[Row]) -> Mapping[str, str]:
    """Return a colour for each group, in the order of its device and size."""
    group_of = _grouping(rows)
    ordered = sorted(rows, key=lambda row: (row["device"], row["num_devices"]))
    groups = dict.fromkeys(group_of(row) for row in ordered)
    return dict(zip(groups, SERIES, strict=False))


def _details(row: Row, rank: str) -> list[str]:
    price = row["usd_per_billion_tokens"]
    cost = (
        f", USD {format_number(price)} per billion tokens,"
        f" USD {format_number(row['usd_per_step'])} a step"
        if price > 0
        else ""
    )
    return [
        f"{rank}. {row['name']}",
        f"{describe_devices(row)}: {describe_choices(row)}",
        (
            f"{format_number(_per_gpu(row))} ({describe_bounds(row)}) tokens/s per GPU, step"
            f" {describe_step(row['step_time_ms'])}, MFU {row['mfu_ratio']:.1%}, bubble"
            f" {row['bubble_ratio']:.1%}, {METRICS['margin_bytes'].words(row)} GiB free{cost}"
        ),
        *([row["placement"]] if row["placement"] else []),
    ]
