"""The charts of a training search's strategies: throughput against memory and against cost."""

from collections.abc import Callable, Sequence

from foretoken.page.block import Column
from foretoken.page.chart import SERIES
from foretoken.page.section import Section
from foretoken.simulator.report.fronts import Front, Looks, front_charts, thin_rows
from foretoken.simulator.report.search_candidates import Row
from foretoken.simulator.report.training_search_rows import (
    best_of_layouts,
    describe_choices,
    describe_devices,
    throughput_bounds,
)

# More layouts with a rank next to them than this hide each other.
_MAX_LABELS = 40
FRONTS = (
    Front(
        title="Throughput against free memory",
        x="margin_bytes",
        y="tokens_per_s_per_gpu",
        column="is_pareto_memory",
        caption="Up and to the right is better: more tokens, and more room for what the estimate of"
        " the memory does not know. Nothing beats those on the line in both.",
        bounds=throughput_bounds,
        is_near=True,
    ),
    Front(
        title="Throughput of the cluster against cost",
        x="usd_per_billion_tokens",
        y="tokens_per_s",
        column="is_pareto_cost",
        caption="Up and to the left is better. The price is that of the devices alone.",
        is_near=True,
    ),
)


def fronts_section(rows: Sequence[Row], num_fitting: int) -> Section:
    """Return the charts of the listed strategies; that of cost only where it is priced."""
    names = {row["name"] for row in best_of_layouts(rows)}
    names |= {row["name"] for row in rows if row["is_pareto_cost"] or row["is_pareto_memory"]}
    drawn = thin_rows(rows, names)
    listed = (
        "all that fit"
        if len(rows) >= num_fitting
        else f"the {len(rows):,} best of {num_fitting:,} that fit"
    )
    return Section(
        title="Throughput, memory and cost",
        intro=(
            f"Every point is a strategy, answered in closed form, of {listed}; {len(drawn):,} are"
            " drawn. The best of each layout has its rank; an equals sign marks ties, which the"
            " error of the estimates cannot tell apart. Axes begin near the points."
        ),
        pictures=front_charts(FRONTS, drawn, make_looks(rows)),
    )


def make_looks(rows: Sequence[Row]) -> Looks:
    """Return how strategies are distinguished: by cluster, else by device."""
    return Looks(
        group=_grouping(rows),
        words=(
            Column.words("rank", read=lambda row: row["place"]),
            Column.words("devices", read=describe_devices),
            Column.words("choices", read=describe_choices),
            Column.words("placement"),
        ),
        labels={row["name"]: row["place"] for row in best_of_layouts(rows)[:_MAX_LABELS]},
    )


def _grouping(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what colours tell apart: clusters, else devices, else nothing where these are many."""
    groupings: tuple[Callable[[Row], str], ...] = (describe_devices, lambda row: str(row["device"]))
    for grouping in groupings:
        if len({grouping(row) for row in rows}) <= len(SERIES):
            return grouping
    return lambda _: "strategies"
