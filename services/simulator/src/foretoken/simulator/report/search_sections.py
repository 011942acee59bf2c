"""The sections of a page about the search for a serving deployment."""

import json
from collections.abc import Sequence

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.page.block import Column, Table, Value
from foretoken.page.section import Section
from foretoken.simulator.report.question import request_sections, with_echo
from foretoken.simulator.report.search_candidates import (
    DEVICE,
    NAME,
    OF_CHANGES,
    PLACE,
    Row,
    best_of_layouts,
    candidate_rows,
    describe_near,
    describe_replicas,
    describe_tied,
    explain_names,
    find_closest,
    qualified_rows,
    ranking_columns,
)
from foretoken.simulator.report.search_finalists import finalist_sections
from foretoken.simulator.report.search_fronts import fronts_section
from foretoken.simulator.report.search_rejections import rejections_section
from foretoken.simulator.report.what_if import what_if_section

_THROUGHPUT, _COST = "output_throughput_tps_per_gpu", "usd_per_million_output_tokens"
_OF_COSTS = (
    *("num_devices", "usd_per_hour", _COST),
    *("request_throughput_rps", "output_throughput_tps"),
)
_CLOSEST = (
    Column.words("closest", "name"),
    Column.words("why not", "reason"),
    Column.words("what helps", "remedy"),
)
# More ties than this are counted.
_MAX_TIES = 5


def search_sections(report: ServingSearchReport) -> list[Section]:
    """Return what a page says of a search: the answer first, what it rests on last."""
    rows = candidate_rows(report.candidates)
    ranked = qualified_rows(report.candidates)
    sections = [_overview(report, ranked)]
    if ranked:
        sections.append(_ranking(ranked))
    if rows:
        sections.append(fronts_section(report))
    if report.finalists:
        sections += finalist_sections([(f, report.candidates) for f in report.finalists])
    if report.num_ruled_out_by_verdict:
        sections.append(rejections_section(report.num_ruled_out_by_verdict, rows))
    if any(row["usd_per_hour"] > 0 for row in ranked):
        sections.append(_costs(ranked))
    if report.sensitivities:
        sections.append(
            what_if_section(
                "The search again with one thing changed, against the best of today{}.",
                "Output tokens/s per GPU of the best deployment",
                report.sensitivities,
                report.best,
                OF_CHANGES,
            )
        )
    seed = json.loads(report.request_json or "{}").get("scenario", {}).get("seed", 0)
    origin = f"Seed {seed}, predictor {report.model_version or 'no trained model'}"
    return with_echo([*sections, *request_sections(report, "serving", origin)], report.echo)


def _overview(report: ServingSearchReport, ranked: Sequence[Row]) -> Section:
    counts = (
        f"Of {report.num_points:,} points {report.num_distinct:,} are distinct;"
        f" {report.num_evaluated:,} were answered in closed form and {report.num_simulated:,}"
        f" simulated request by request, in {report.wall_s:.3g} s with {report.cpu_s:.3g} s of CPU"
        " time."
    )
    if report.num_near:
        near = describe_near(report)
        counts += f" {near[0].upper()}{near[1:]}."
    if not ranked:
        return Section(
            title="The best deployment",
            warning="No deployment of this space meets the targets; see why each failed below.",
            intro=counts,
            table=Table.of(find_closest(candidate_rows(report.candidates)), *_CLOSEST),
        )
    best = ranked[0]
    tied = describe_tied([name for name in report.ties if name != report.best], _MAX_TIES)
    return Section(
        title="The best deployment",
        intro=f"{report.best or best['name']} ranks first.{tied} {counts}",
        facts=_facts(report, best),
    )


def _facts(report: ServingSearchReport, best: Row) -> list[Value]:
    facts = [
        Value.of(_THROUGHPUT, best, low=best["tps_per_gpu_low"], high=best["tps_per_gpu_high"]),
        Value.of("tps_per_user", best, f"{METRICS['tpot_ms'].label} {best['tpot_ms']:.3g} ms"),
        Value.of("ttft_ms", best, low=best["ttft_low_ms"], high=best["ttft_high_ms"]),
        Value.of(
            "num_devices", best, f"{best['device']}, {describe_replicas(best)}{_idle_note(best)}"
        ),
    ]
    if best[_COST] > 0:
        facts.append(Value.of(_COST, best, f"USD {format_number(best['usd_per_hour'])} an hour"))
    if report.min_devices:
        facts.append(Value.of("min_devices", report, report.min_devices_by))
    if report.min_usd_per_hour:
        facts.append(Value.of("min_usd_per_hour", report, report.min_usd_per_hour_by))
    return facts


def _idle_note(row: Row) -> str:
    """Return how many of the devices there are a deployment leaves idle, and if they count."""
    if not row["num_idle_devices"]:
        return ""
    counts = row["num_counted_devices"] > row["num_devices"]
    verb = "counted" if counts else "not counted"
    return f"; {row['num_idle_devices']:,} idle, {verb} per GPU"


def _ranking(ranked: Sequence[Row]) -> Section:
    shown = best_of_layouts(ranked)
    return Section(
        title="Ranking",
        intro=(
            f"{len(ranked):,} deployments qualify; this is the best of each layout. Equal ranks "
            "are ties: their intervals cannot distinguish them. `2 x` are two replicas; prefill "
            "replicas stand before the plus sign, decode replicas behind. "
            + explain_names(row["name"] for row in shown)
        ),
        table=Table.of(shown, *ranking_columns(shown)),
    )


def _costs(ranked: Sequence[Row]) -> Section:
    priced = [row for row in ranked if row["usd_per_hour"] > 0]
    ordered = sorted(priced, key=lambda row: row["usd_per_million_output_tokens"])
    figures = (Column.of(name) for name in _OF_COSTS)
    return Section(
        title="Cost",
        intro=(
            "The cheapest of each layout by its output tokens; devices only, as priced in the "
            "request."
        ),
        table=Table.of(best_of_layouts(ordered), NAME, DEVICE, *figures, PLACE),
    )
