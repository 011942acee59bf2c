"""Charts of the candidates of searches: two metrics against each other, and the best of both."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from operator import itemgetter

from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.units import MS_PER_S
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import GREY, SERIES, Plot, Rule
from foretoken.page.section import Section
from foretoken.simulator.report import search_candidates as candidates
from foretoken.simulator.report import training_search_rows as strategies
from foretoken.simulator.report.search_candidates import Row

RULED_OUT = "ruled out"
# The metrics that rows have the bounds of.
_BOUNDED = ("output_throughput_tps_per_gpu", "tokens_per_s_per_gpu")
# More points of a kind than this make a page slow to open; the rest are left out evenly.
_MAX_POINTS = 2500


# By the column that says which candidates nothing beats in both metrics.
Fronts = Mapping[str, Plot]


def front_charts(
    fronts: Fronts,
    rows: Sequence[Row],
    words: Sequence[Column],
    rules: Sequence[Sequence[Rule]] = ((), ()),
) -> list[Chart]:
    """Return the charts of those that have points, with `rules` as marks of each.

    A row has the `group` that colours it. Rows of one search have a `label` and bounds, too; those
    of several searches have none, and lines through each group.
    """
    charts = []
    for (column, plot), marks in zip(fronts.items(), rules, strict=True):
        found = [row for row in rows if row[plot.x] and row[plot.y] > 0]
        if found:
            charts.append(_front_chart(column, replace(plot, rules=marks), found, words))
    return charts


def thin_rows(rows: Sequence[Row], names: Collection[str], most: int = _MAX_POINTS) -> list[Row]:
    """Return those with these names, and of the others as many as can be drawn, evenly."""
    others = [row for row in rows if row["name"] not in names]
    return [row for row in rows if row["name"] in names] + others[:: -(-len(others) // most) or 1]


def _labelled(rows: Sequence[Row], group: Callable[[Row], str], best: Sequence[Row]) -> list[Row]:
    """Return rows with their groups, and the rank of the best next to their points."""
    names = {row["name"] for row in best}
    return [
        {**row, "group": group(row), "label": row["place"] if row["name"] in names else ""}
        for row in rows
    ]


def _front_chart(column: str, plot: Plot, rows: Sequence[Row], words: Sequence[Column]) -> Chart:
    """Return the chart of candidates that have both metrics."""
    is_alone = "label" in rows[0]
    bounds = candidates.bound_columns(plot.y) if is_alone and plot.y in _BOUNDED else ()
    table = Table.of(
        rows,
        Column.words("candidate", "name"),
        Column.words("group"),
        *(Column.of(name) for name in (plot.x, plot.y)),
        *words,
        Column.words(
            "Pareto front",
            "front",
            lambda row: ("on it" if is_alone else row["group"]) if row[column] else "",
        ),
        Column.words("label", read=lambda row: row.get("label", "")),
        *bounds,
    )
    # What is ruled out is grey and comes last.
    groups = dict.fromkeys(map(str, table.values("group")))
    colors = dict(zip((name for name in groups if name != RULED_OUT), cycle(SERIES), strict=False))
    if RULED_OUT in groups:
        colors[RULED_OUT] = GREY
    drawn = replace(plot, table=table, by="group", colors=colors, height=400)
    low_and_high = (bounds[0].name, bounds[1].name) if bounds else None
    return drawn.scatter(front="front", intervals=low_and_high, label="label")


# Points that are ruled out are drawn as far as this from those that qualify.
_REACH_RATIO = 2.0
_SETTINGS = ("profile", "quantization", "speculation", "rules", "kv_tiers", "router")
SERVING_FRONTS: Fronts = {
    "is_pareto_user": Plot(
        title="Throughput of a GPU against speed for a user",
        x="tps_per_user",
        y="output_throughput_tps_per_gpu",
        caption="Up and to the right is better: no deployment is faster for a user and yields more"
        " per GPU than those on the line.",
    ),
    "is_pareto_cost": Plot(
        title="Cost against latency",
        x="tpot_ms",
        y="usd_per_million_output_tokens",
        caption="Down and to the left is better. The price is that of the devices alone.",
    ),
}


def serving_fronts_section(report: ServingSearchReport) -> Section:
    """Return the charts of the candidates; that of cost only where prices are known."""
    rows = _group_deployments(candidates.candidate_rows(report.candidates))
    drawn = _drawn(rows)
    num, num_drawn = (Counter(row["rank"] > 0 for row in some) for some in (rows, drawn))
    targets = json.loads(report.request_json or "{}").get("targets", {})
    of_tpot = [one for one in targets.get("limits", ()) if one.get("metric") == "tpot_ms"]
    limit_ms = min((float(one["limit_ms"]) for one in of_tpot), default=0.0)
    limits = (MS_PER_S / limit_ms, limit_ms) if limit_ms else ()
    rules = [[Rule("x", limit, f"TPOT {limit_ms:g} ms")] for limit in limits] or [[], []]
    return Section(
        title="Throughput, speed and cost",
        intro=(
            "Every point is a deployment, answered in closed form for a steady load. The best of "
            "each layout has its rank; an equals sign marks ties, which the estimates' error cannot"
            f" tell apart. {num_drawn[True]:,} of the {num[True]:,} deployments that qualify are"
            f" drawn, and {num_drawn[False]:,} of the {num[False]:,} that do not."
        ),
        pictures=front_charts(SERVING_FRONTS, drawn, SERVING_WORDS, rules),
    )


def _why_not(row: Row) -> str:
    return "" if row["rank"] else f"{candidates.describe_verdict(row['verdict'])}: {row['reason']}"


SERVING_WORDS: Sequence[Column] = (
    Column.words("rank", read=lambda row: row["place"]),
    Column.words("GPUs", read=lambda row: f"{row['num_devices']:,} {row['device']}"),
    Column.words("replicas", read=candidates.describe_replicas),
    Column.words("batch", read=candidates.describe_batch),
    Column.words(
        "engine", read=lambda row: ", ".join(row[name] for name in _SETTINGS if row[name])
    ),
    Column.words("why not", read=_why_not),
)


def _group_deployments(rows: Sequence[Row]) -> list[Row]:
    """Return rows with groups and labels: by device where these differ, else by mode."""
    devices = {row["device"] for row in rows if row["rank"] > 0}

    def group(row: Row) -> str:
        if not row["rank"]:
            return RULED_OUT
        return f"{row['device']}, {row['mode']}" if len(devices) > 1 else str(row["mode"])

    return _labelled(rows, group, candidates.best_of_layouts([r for r in rows if r["rank"] > 0]))


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
TRAINING_FRONTS: Fronts = {
    "is_pareto_memory": Plot(
        title="Throughput against free memory",
        x="margin_bytes",
        y="tokens_per_s_per_gpu",
        caption="Up and to the right is better: more tokens, and more room for what the estimate of"
        " the memory does not know. Nothing beats those on the line in both.",
        is_near=True,
    ),
    "is_pareto_cost": Plot(
        title="Throughput of the cluster against cost",
        x="usd_per_billion_tokens",
        y="tokens_per_s",
        caption="Up and to the left is better. The price is that of the devices alone.",
        is_near=True,
    ),
}


def training_fronts_section(rows: Sequence[Row], num_fitting: int) -> Section:
    """Return the charts of the listed strategies; that of cost only where it is priced."""
    best = strategies.best_of_layouts(rows)
    names = {row["name"] for row in best}
    names |= {row["name"] for row in rows if row["is_pareto_cost"] or row["is_pareto_memory"]}
    drawn = thin_rows(_group_strategies(rows, best), names)
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
        pictures=front_charts(TRAINING_FRONTS, drawn, TRAINING_WORDS),
    )


TRAINING_WORDS: Sequence[Column] = (
    Column.words("rank", read=lambda row: row["place"]),
    Column.words("devices", read=strategies.describe_devices),
    Column.words("choices", read=strategies.describe_choices),
    Column.words("placement"),
)


def _group_strategies(rows: Sequence[Row], best: Sequence[Row]) -> list[Row]:
    """Return rows with groups and labels: by cluster, else by device, else all where many."""
    groupings = (strategies.describe_devices, itemgetter("device"), lambda _: "strategies")
    group = next(of for of in groupings if len({of(row) for row in rows}) <= len(SERIES))
    return _labelled(rows, group, best[:_MAX_LABELS])
