"""The pictures of a search's candidates: throughput against speed, cost against latency."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.units import MS_PER_S
from foretoken.page.figure import GREY, SERIES
from foretoken.page.section import Picture, Section
from foretoken.simulator.report.scatter_plot import Mark, Scatter, draw_scatter
from foretoken.simulator.report.search_candidates import (
    Row,
    best_of_layouts,
    candidate_rows,
    describe_batch,
    describe_replicas,
    describe_verdict,
)

# A page with more points of a kind than this is slow to open; the rest are left out evenly.
_MAX_MARKS = 600
_RULED_OUT = "ruled out"
# Points that are ruled out are drawn as far as this from those that qualify.
_REACH_RATIO = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axes:
    """Which columns a picture has; `x_range` and `y_range` are their bounds."""

    x: str
    y: str
    x_range: tuple[str, str] | None = None
    y_range: tuple[str, str] | None = None
    is_inverse: bool = False


_USER = _Axes(
    x="tps_per_user",
    y="output_throughput_tps_per_gpu",
    x_range=("tpot_high_ms", "tpot_low_ms"),
    y_range=("tps_per_gpu_low", "tps_per_gpu_high"),
    is_inverse=True,
)
_COST = _Axes(
    x="tpot_ms", y="usd_per_million_output_tokens", x_range=("tpot_low_ms", "tpot_high_ms")
)


def fronts_section(report: ServingSearchReport) -> Section:
    """Return the Pareto pictures of the candidates; that of cost only where prices are known."""
    rows = candidate_rows(report.candidates)
    drawn = _drawn(rows)
    colors = _colors(drawn)
    limit_ms = _tpot_limit_ms(report.request_json)
    pictures = [_user_picture(rows, drawn, colors, limit_ms)]
    if any(row["usd_per_million_output_tokens"] > 0 for row in drawn):
        pictures.append(_cost_picture(rows, drawn, colors, limit_ms))
    return Section(
        title="Throughput, speed and cost",
        intro=(
            "Every point is a deployment, answered in closed form for a steady load. The best of "
            "each layout is larger, with its rank; an equals sign marks ties, which the estimates' "
            "error cannot tell apart."
        ),
        pictures=pictures,
    )


def _user_picture(
    rows: Sequence[Row], drawn: Sequence[Row], colors: Mapping[str, str], limit_ms: float
) -> Picture:
    limit = (MS_PER_S / limit_ms, f"TPOT {limit_ms:g} ms") if limit_ms else None
    plot = Scatter(
        title="Throughput of a GPU against speed for a user",
        x_label=f"{METRICS['tps_per_user'].label} (1000 / TPOT in ms)",
        y_label=METRICS["output_throughput_tps_per_gpu"].title,
        marks=_marks(drawn, rows, _USER, colors),
        legend=_legend(drawn, colors),
        front=[
            (row["tps_per_user"], row["output_throughput_tps_per_gpu"])
            for row in drawn
            if row["is_pareto_user"]
        ],
        limit=limit,
    )
    return Picture(
        svg=draw_scatter("search-user", plot),
        caption=(
            "Up and to the right is better: no deployment is faster for a user and yields more per "
            f"GPU than those on the line. {_say_drawn(rows, drawn)}"
        ),
    )


def _cost_picture(
    rows: Sequence[Row], drawn: Sequence[Row], colors: Mapping[str, str], limit_ms: float
) -> Picture:
    plot = Scatter(
        title="Cost against latency",
        x_label=METRICS["tpot_ms"].title,
        y_label=METRICS["usd_per_million_output_tokens"].title,
        marks=_marks(
            [row for row in drawn if row["usd_per_million_output_tokens"] > 0], rows, _COST, colors
        ),
        may_be_log=True,
        legend=_legend(drawn, colors),
        front=[
            (row["tpot_ms"], row["usd_per_million_output_tokens"])
            for row in drawn
            if row["is_pareto_cost"]
        ],
        limit=(limit_ms, f"TPOT {limit_ms:g} ms") if limit_ms else None,
    )
    return Picture(
        svg=draw_scatter("search-cost", plot),
        caption="Down and to the left is better. The price is that of the devices alone.",
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
    names = {row["name"] for row in best_of_layouts(ranked)}
    names |= {row["name"] for row in near if row["is_pareto_user"] or row["is_pareto_cost"]}
    kept = [row for row in near if row["name"] in names]
    for is_ranked in (True, False):
        others = [
            row for row in near if (row["rank"] > 0) == is_ranked and row["name"] not in names
        ]
        kept += others[:: -(-len(others) // _MAX_MARKS) or 1]
    return kept


def _say_drawn(rows: Sequence[Row], drawn: Sequence[Row]) -> str:
    ranked = sum(row["rank"] > 0 for row in drawn)
    all_ranked = sum(row["rank"] > 0 for row in rows)
    return (
        f"{ranked:,} of the {all_ranked:,} deployments that qualify are drawn, and"
        f" {len(drawn) - ranked:,} of the {len(rows) - all_ranked:,} that do not."
    )


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    """Return a colour per group of what differs: devices, else modes."""
    groups = sorted({_group_of(row) for row in rows if row["rank"] > 0})
    modes = sorted({row["mode"] for row in rows if row["rank"] > 0})
    devices = {row["device"] for row in rows if row["rank"] > 0}
    if len(devices) <= 1:
        return {mode: SERIES[place % len(SERIES)] for place, mode in enumerate(modes)}
    return {group: SERIES[place % len(SERIES)] for place, group in enumerate(groups)}


def _group_of(row: Row) -> str:
    return f"{row['device']}, {row['mode']}"


def _color_of(row: Row, colors: Mapping[str, str]) -> str:
    if not row["rank"]:
        return GREY
    return colors.get(_group_of(row)) or colors.get(row["mode"], GREY)


def _legend(rows: Sequence[Row], colors: Mapping[str, str]) -> list[tuple[str, str]]:
    ruled_out = [(_RULED_OUT, GREY)] if any(not row["rank"] for row in rows) else []
    return [*colors.items(), *ruled_out]


def _marks(
    drawn: Sequence[Row], rows: Sequence[Row], axes: _Axes, colors: Mapping[str, str]
) -> list[Mark]:
    best = {row["name"] for row in best_of_layouts([row for row in rows if row["rank"] > 0])}
    num_of_rank = Counter(row["rank"] for row in rows)
    marks = []
    for row in drawn:
        is_best = row["name"] in best
        rank = f"{'=' * (num_of_rank[row['rank']] > 1)}{row['rank']}" if row["rank"] else ""
        marks.append(
            Mark(
                x=row[axes.x],
                y=row[axes.y],
                details=_details(row, rank),
                color=_color_of(row, colors),
                label=rank if is_best else "",
                x_range=_range(row, axes.x_range, is_inverse=axes.is_inverse),
                y_range=_range(row, axes.y_range),
                weight="strong" if is_best else "plain" if rank else "faint",
            )
        )
    return marks


def _range(
    row: Row, names: tuple[str, str] | None, *, is_inverse: bool = False
) -> tuple[float, float] | None:
    if names is None:
        return None
    low, high = (row[name] for name in names)
    if low <= 0 or high <= 0:
        return None
    return (MS_PER_S / low, MS_PER_S / high) if is_inverse else (low, high)


def _details(row: Row, rank: str) -> list[str]:
    words = [
        f"{row['num_devices']:,} {row['device']}",
        row["mode"],
        describe_replicas(row),
        f"batch {describe_batch(row)}",
        row["profile"],
        row["quantization"],
        row["speculation"],
        row["rules"],
    ]
    price = row["usd_per_million_output_tokens"]
    if price > 0:
        words.append(f"USD {format_number(price)} per million output tokens")
        words.append(f"USD {format_number(row['usd_per_hour'])} an hour")
    verdict = [] if rank else [f"{describe_verdict(row['verdict'])}: {row['reason']}"]
    return [
        f"{rank}. {row['name']}" if rank else row["name"],
        ", ".join(word for word in words if word),
        (
            f"{_with_range(row, 'output_throughput_tps_per_gpu', 'tps_per_gpu')} tokens/s per GPU, "
            f"{format_number(row['tps_per_user'])} tokens/s per user, "
            f"TTFT {_with_range(row, 'ttft_ms', 'ttft', '_ms')} ms, "
            f"TPOT {_with_range(row, 'tpot_ms', 'tpot', '_ms')} ms"
        ),
        *verdict,
    ]


def _with_range(row: Row, name: str, start: str, end: str = "") -> str:
    low, high = row[f"{start}_low{end}"], row[f"{start}_high{end}"]
    value = format_number(row[name])
    return f"{value} ({format_number(low)} to {format_number(high)})" if high > 0 else value


def _tpot_limit_ms(request_json: str) -> float:
    """Return the tightest limit of TPOT that the request sets; 0 where it sets none."""
    targets = (json.loads(request_json) if request_json else {}).get("targets", {})
    limits = [
        float(limit["limit_ms"])
        for limit in targets.get("limits", ())
        if limit.get("metric") == "tpot_ms"
    ]
    return min(limits, default=0.0)
