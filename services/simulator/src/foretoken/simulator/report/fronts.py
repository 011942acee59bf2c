"""Charts of the candidates of searches: two metrics against each other, and the best of both."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.units import MS_PER_S
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import GREY, SERIES, Plot, Rule
from foretoken.page.section import Section
from foretoken.simulator.report import search_candidates as candidates
from foretoken.simulator.report import training_search_rows as strategies
from foretoken.simulator.report.search_candidates import Row

RULED_OUT = "ruled out"
# More points of a kind than this make a page slow to open; the rest are left out evenly.
_MAX_POINTS = 2500


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """Two metrics, and the column that says which candidates nothing beats in both.

    `has_bounds`: those of `y` are drawn. `is_near`: the axes begin near the points.
    """

    title: str
    x: str
    y: str
    column: str
    caption: str
    has_bounds: bool = False
    is_near: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks:
    """How candidates are distinguished: the group that colours each, and words on each.

    `labels` are written next to the points of these names. `is_line_by_group`: a front for each.
    """

    group: Callable[[Row], str]
    words: Sequence[Column]
    labels: Mapping[str, str]
    is_line_by_group: bool = False


def front_charts(
    fronts: Sequence[Front], rows: Sequence[Row], looks: Looks, rules: Sequence[Sequence[Rule]] = ()
) -> list[Chart]:
    """Return the charts of those that have points; `rules` are marks of each."""
    return [
        _front_chart(front, found, looks, marks)
        for front, marks in zip(fronts, rules or [()] * len(fronts), strict=True)
        if (found := [row for row in rows if row[front.x] and row[front.y] > 0])
    ]


def thin_rows(rows: Sequence[Row], names: Collection[str], most: int = _MAX_POINTS) -> list[Row]:
    """Return those with these names, and of the others as many as can be drawn, evenly."""
    others = [row for row in rows if row["name"] not in names]
    return [row for row in rows if row["name"] in names] + others[:: -(-len(others) // most) or 1]


def _front_chart(front: Front, rows: Sequence[Row], looks: Looks, rules: Sequence[Rule]) -> Chart:
    """Return the chart of candidates that have both metrics."""

    def line(row: Row) -> str:
        on_it = looks.group(row) if looks.is_line_by_group else "on it"
        return on_it if row[front.column] else ""

    has_bounds = front.has_bounds and not looks.is_line_by_group
    bounds = candidates.bound_columns(front.y) if has_bounds else ()
    table = Table.of(
        rows,
        Column.words("candidate", "name"),
        Column.words("group", read=looks.group),
        *(Column.of(name) for name in (front.x, front.y)),
        *looks.words,
        Column.words("Pareto front", "front", line),
        Column.words("label", read=lambda row: looks.labels.get(row["name"], "")),
        *bounds,
    )
    # What is ruled out is grey and comes last.
    groups = dict.fromkeys(map(str, table.values("group")))
    colors = dict(zip((name for name in groups if name != RULED_OUT), cycle(SERIES), strict=False))
    if RULED_OUT in groups:
        colors[RULED_OUT] = GREY
    plot = Plot(
        title=front.title,
        table=table,
        x=front.x,
        y=front.y,
        by="group",
        colors=colors,
        caption=front.caption,
        rules=rules,
        is_near=front.is_near,
        height=400,
    )
    low_and_high = (bounds[0].name, bounds[1].name) if bounds else None
    return plot.scatter(front="front", intervals=low_and_high, label="label")


# Points that are ruled out are drawn as far as this from those that qualify.
_REACH_RATIO = 2.0
_SETTINGS = ("profile", "quantization", "speculation", "rules", "kv_tiers", "router")
SERVING_FRONTS = (
    Front(
        title="Throughput of a GPU against speed for a user",
        x="tps_per_user",
        y="output_throughput_tps_per_gpu",
        column="is_pareto_user",
        caption="Up and to the right is better: no deployment is faster for a user and yields more"
        " per GPU than those on the line.",
        has_bounds=True,
    ),
    Front(
        title="Cost against latency",
        x="tpot_ms",
        y="usd_per_million_output_tokens",
        column="is_pareto_cost",
        caption="Down and to the left is better. The price is that of the devices alone.",
    ),
)


def serving_fronts_section(report: ServingSearchReport) -> Section:
    """Return the charts of the candidates; that of cost only where prices are known."""
    rows = candidates.candidate_rows(report.candidates)
    drawn = _drawn(rows)
    num, num_drawn = (Counter(row["rank"] > 0 for row in some) for some in (rows, drawn))
    targets = json.loads(report.request_json or "{}").get("targets", {})
    of_tpot = [one for one in targets.get("limits", ()) if one.get("metric") == "tpot_ms"]
    limit_ms = min((float(one["limit_ms"]) for one in of_tpot), default=0.0)
    limits = (MS_PER_S / limit_ms, limit_ms) if limit_ms else ()
    rules = [[Rule("x", limit, f"TPOT {limit_ms:g} ms")] for limit in limits]
    return Section(
        title="Throughput, speed and cost",
        intro=(
            "Every point is a deployment, answered in closed form for a steady load. The best of "
            "each layout has its rank; an equals sign marks ties, which the estimates' error cannot"
            f" tell apart. {num_drawn[True]:,} of the {num[True]:,} deployments that qualify are"
            f" drawn, and {num_drawn[False]:,} of the {num[False]:,} that do not."
        ),
        pictures=front_charts(SERVING_FRONTS, drawn, serving_looks(rows), rules),
    )


def serving_looks(rows: Sequence[Row]) -> Looks:
    """Return how candidates are distinguished: by device where these differ, else by mode."""
    devices = {row["device"] for row in rows if row["rank"] > 0}

    def group(row: Row) -> str:
        if not row["rank"]:
            return RULED_OUT
        return f"{row['device']}, {row['mode']}" if len(devices) > 1 else str(row["mode"])

    best = candidates.best_of_layouts([row for row in rows if row["rank"] > 0])
    return Looks(
        group=group,
        words=(
            Column.words("rank", read=lambda row: row["place"]),
            Column.words("GPUs", read=lambda row: f"{row['num_devices']:,} {row['device']}"),
            Column.words("replicas", read=candidates.describe_replicas),
            Column.words("batch", read=candidates.describe_batch),
            Column.words(
                "engine", read=lambda row: ", ".join(row[name] for name in _SETTINGS if row[name])
            ),
            Column.words(
                "why not",
                read=lambda row: (
                    ""
                    if row["rank"]
                    else f"{candidates.describe_verdict(row['verdict'])}: {row['reason']}"
                ),
            ),
        ),
        labels={row["name"]: row["place"] for row in best},
    )


def _drawn(rows: Sequence[Row]) -> list[Row]:
    """Return the rows to draw: many are thinned out, fronts and the best of layouts kept.

    What is ruled out is drawn near those that qualify, or everywhere if none does.
    """
    placed = [
        row for row in rows if row["tps_per_user"] > 0 and row["output_throughput_tps_per_gpu"] > 0
    ]
    ranked = [row for row in placed if row["rank"] > 0]
    slowest = min((row["tps_per_user"] for row in ranked), default=0.0) / _REACH_RATIO
    near = [row for row in placed if row["rank"] > 0 or row["tps_per_user"] >= slowest]
    names = {row["name"] for row in candidates.best_of_layouts(ranked)}
    names |= {row["name"] for row in near if row["is_pareto_user"] or row["is_pareto_cost"]}
    return [
        row
        for is_ranked in (True, False)
        for row in thin_rows([row for row in near if (row["rank"] > 0) == is_ranked], names)
    ]


# More layouts with a rank next to them than this hide each other.
_MAX_LABELS = 40
TRAINING_FRONTS = (
    Front(
        title="Throughput against free memory",
        x="margin_bytes",
        y="tokens_per_s_per_gpu",
        column="is_pareto_memory",
        caption="Up and to the right is better: more tokens, and more room for what the estimate of"
        " the memory does not know. Nothing beats those on the line in both.",
        has_bounds=True,
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


def training_fronts_section(rows: Sequence[Row], num_fitting: int) -> Section:
    """Return the charts of the listed strategies; that of cost only where it is priced."""
    names = {row["name"] for row in strategies.best_of_layouts(rows)}
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
        pictures=front_charts(TRAINING_FRONTS, drawn, training_looks(rows)),
    )


def training_looks(rows: Sequence[Row]) -> Looks:
    """Return how strategies are distinguished: by cluster, else by device."""
    groupings: tuple[Callable[[Row], str], ...] = (
        strategies.describe_devices,
        lambda row: str(row["device"]),
    )
    return Looks(
        # Clusters, else devices, else nothing where these are many.
        group=next(
            (of for of in groupings if len({of(row) for row in rows}) <= len(SERIES)),
            lambda _: "strategies",
        ),
        words=(
            Column.words("rank", read=lambda row: row["place"]),
            Column.words("devices", read=strategies.describe_devices),
            Column.words("choices", read=strategies.describe_choices),
            Column.words("placement"),
        ),
        labels={
            row["name"]: row["place"] for row in strategies.best_of_layouts(rows)[:_MAX_LABELS]
        },
    )
