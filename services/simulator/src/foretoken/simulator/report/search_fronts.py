"""The charts of a search's candidates: throughput against speed, cost against latency."""

import json
from collections.abc import Sequence

from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.units import MS_PER_S
from foretoken.page.block import Column
from foretoken.page.chart import Rule
from foretoken.page.section import Section
from foretoken.simulator.report.fronts import RULED_OUT, Front, Looks, front_charts, thin_rows
from foretoken.simulator.report.search_candidates import (
    Row,
    best_of_layouts,
    candidate_rows,
    describe_batch,
    describe_replicas,
    describe_verdict,
)

# Points that are ruled out are drawn as far as this from those that qualify.
_REACH_RATIO = 2.0
FRONTS = (
    Front(
        title="Throughput of a GPU against speed for a user",
        x="tps_per_user",
        y="output_throughput_tps_per_gpu",
        column="is_pareto_user",
        caption="Up and to the right is better: no deployment is faster for a user and yields more"
        " per GPU than those on the line.",
        bounds=lambda row: (row["tps_per_gpu_low"], row["tps_per_gpu_high"]),
    ),
    Front(
        title="Cost against latency",
        x="tpot_ms",
        y="usd_per_million_output_tokens",
        column="is_pareto_cost",
        caption="Down and to the left is better. The price is that of the devices alone.",
    ),
)


def fronts_section(report: ServingSearchReport) -> Section:
    """Return the charts of the candidates; that of cost only where prices are known."""
    rows = candidate_rows(report.candidates)
    drawn = _drawn(rows)
    limit_ms = _tpot_limit_ms(report.request_json)
    limits = (MS_PER_S / limit_ms, limit_ms) if limit_ms else ()
    rules = [[Rule("x", limit, f"TPOT {limit_ms:g} ms")] for limit in limits]
    return Section(
        title="Throughput, speed and cost",
        intro=(
            "Every point is a deployment, answered in closed form for a steady load. The best of "
            "each layout has its rank; an equals sign marks ties, which the estimates' error cannot"
            f" tell apart. {_say_drawn(rows, drawn)}"
        ),
        pictures=front_charts(FRONTS, drawn, make_looks(rows), rules),
    )


def make_looks(rows: Sequence[Row]) -> Looks:
    """Return how candidates are distinguished: by device where these differ, else by mode."""
    devices = {row["device"] for row in rows if row["rank"] > 0}

    def group(row: Row) -> str:
        if not row["rank"]:
            return RULED_OUT
        return f"{row['device']}, {row['mode']}" if len(devices) > 1 else str(row["mode"])

    best = best_of_layouts([row for row in rows if row["rank"] > 0])
    return Looks(
        group=group,
        words=(
            Column.words("rank", read=lambda row: row["place"]),
            Column.words("GPUs", read=lambda row: f"{row['num_devices']:,} {row['device']}"),
            Column.words("replicas", read=describe_replicas),
            Column.words("batch", read=describe_batch),
            Column.words("engine", read=_settings),
            Column.words("why not", read=_why_not),
        ),
        labels={row["name"]: row["place"] for row in best},
    )


def _why_not(row: Row) -> str:
    return "" if row["rank"] else f"{describe_verdict(row['verdict'])}: {row['reason']}"


def _settings(row: Row) -> str:
    names = ("profile", "quantization", "speculation", "rules", "kv_tiers", "router")
    return ", ".join(row[name] for name in names if row[name])


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
    return [
        row
        for is_ranked in (True, False)
        for row in thin_rows([row for row in near if (row["rank"] > 0) == is_ranked], names)
    ]


def _say_drawn(rows: Sequence[Row], drawn: Sequence[Row]) -> str:
    ranked = sum(row["rank"] > 0 for row in drawn)
    all_ranked = sum(row["rank"] > 0 for row in rows)
    return (
        f"{ranked:,} of the {all_ranked:,} deployments that qualify are drawn, and"
        f" {len(drawn) - ranked:,} of the {len(rows) - all_ranked:,} that do not."
    )


def _tpot_limit_ms(request_json: str) -> float:
    """Return the tightest limit of TPOT that the request sets; 0 where it sets none."""
    targets = (json.loads(request_json) if request_json else {}).get("targets", {})
    limits = [
        float(limit["limit_ms"])
        for limit in targets.get("limits", ())
        if limit.get("metric") == "tpot_ms"
    ]
    return min(limits, default=0.0)
