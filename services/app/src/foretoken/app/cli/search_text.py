"""The report of a search for a deployment, for a terminal."""

from collections.abc import Sequence

from rich.table import Table

from foretoken.app.cli.state import page_table, stack
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.page.block import Table as PageTable
from foretoken.simulator.report.search_candidates import (
    OF_CHANGES,
    Row,
    best_of_layouts,
    candidate_rows,
    describe_near,
    describe_verdict,
    find_closest,
    ranked_rows,
    ranking_columns,
)
from foretoken.simulator.report.search_finalists import finalist_columns
from foretoken.simulator.report.what_if import change_columns

# More ties than this are counted.
_MAX_TIES = 5


def report_table(title: str, report: ServingSearchReport, num_shown: int) -> Table:
    """Return the best deployments, the finalists' simulations, the answers and the counts."""
    ranked = ranked_rows(candidate_rows(report.candidates))
    parts: list[Table | str] = []
    if ranked:
        shown = best_of_layouts(ranked)[:num_shown]
        parts.append(page_table(title, PageTable.of(shown, *ranking_columns(shown))))
    else:
        parts += ["", *_nothing(title, report)]
    if report.finalists:
        found = [(finalist, report.candidates) for finalist in report.finalists]
        table = PageTable.of(found, *finalist_columns(found))
        parts.append(page_table("Simulated request by request", table))
    if report.sensitivities:
        changes = PageTable.of(report.sensitivities, *change_columns(OF_CHANGES))
        parts.append(page_table("What if", changes))
    return stack(*parts, "", *_answers(report, ranked), *_counts(report))


def _nothing(title: str, report: ServingSearchReport) -> list[str]:
    """Return that nothing qualifies, what came closest, and what would help it."""
    lines = [f"{title}: no deployment of this space meets the targets"]
    for closest in find_closest(candidate_rows(report.candidates)):
        help_line = f"; what helps: {closest['remedy']}" if closest["remedy"] else ""
        lines.append(f"closest, {closest['name']}: {closest['reason']}{help_line}")
    return lines


def _answers(report: ServingSearchReport, ranked: Sequence[Row]) -> list[str]:
    """Return what the ranking does not say by itself: ties and what carries the rate."""
    lines = [f"{len(ranked):,} deployments qualify; above is the best of each layout"][
        : len(ranked)
    ]
    ties = [name for name in report.ties if name != report.best]
    if ties:
        more = f" and {len(ties) - _MAX_TIES:,} more" if len(ties) > _MAX_TIES else ""
        lines.append(
            f"{report.best} ties, within the error of the estimates, with"
            f" {', '.join(ties[:_MAX_TIES])}{more}"
        )
    if report.min_devices:
        lines.append(
            f"{METRICS['min_devices'].label}: {report.min_devices:,}, {report.min_devices_by}"
        )
    if report.min_usd_per_hour:
        usd = format_number(report.min_usd_per_hour, 4)
        by = report.min_usd_per_hour_by
        lines.append(f"{METRICS['min_usd_per_hour'].label}: USD {usd} an hour, {by}")
    return lines


def _counts(report: ServingSearchReport) -> list[str]:
    ruled_out = sorted(report.num_ruled_out_by_verdict.items(), key=lambda item: -item[1])
    points = (
        f"{report.num_points:,} points, {report.num_distinct:,} of them distinct:"
        f" {report.num_evaluated:,} answered in closed form, {report.num_simulated:,} simulated"
    )
    lines = [points]
    if report.num_near:
        lines.append(describe_near(report))
    if ruled_out:
        words = (f"{count:,} {describe_verdict(name)}" for name, count in ruled_out)
        lines.append(f"ruled out: {', '.join(words)}")
    lines.append(
        f"{report.wall_s:.3g} s, {report.cpu_s:.3g} s of CPU time, {report.num_workers} workers,"
        f" predictor {report.model_version or '(no trained model)'}"
    )
    return lines
