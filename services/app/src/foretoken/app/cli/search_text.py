"""The report of a search for a deployment, for a terminal."""

from collections.abc import Callable, Sequence

from rich.table import Table

from foretoken.app.cli.state import build_table, item_table, stack
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.search import (
    CandidateColumns,
    Finalist,
    Sensitivity,
    ServingSearchReport,
)
from foretoken.simulator.report.search_candidates import (
    Row,
    best_of_layouts,
    candidate_rows,
    describe_verdict,
    find_closest,
    latency_titles,
    missed_outcomes,
    proposed_rate,
    qualified_rows,
    steady_figures,
)
from foretoken.simulator.report.what_if import describe_best_then, describe_change

_THROUGHPUT, _COST = "output_throughput_tps_per_gpu", "usd_per_million_output_tokens"
_LATENCIES = ("ttft_ms", "tpot_ms")
# More ties than this are counted.
_MAX_TIES = 5
_Column = Callable[[Row], object]


def report_table(title: str, report: ServingSearchReport, num_shown: int) -> Table:
    """Return the best deployments, the finalists' simulations, the answers and the counts."""
    ranked = qualified_rows(report.candidates)
    parts: list[Table | str] = []
    if ranked:
        parts.append(_ranking(title, ranked, num_shown))
    else:
        parts += ["", *_nothing(title, report)]
    if report.finalists:
        parts.append(_finalists(report.finalists, report.candidates))
    if report.sensitivities:
        parts.append(_sensitivities(report.sensitivities))
    return stack(*parts, "", *_answers(report, ranked), *_counts(report))


def _nothing(title: str, report: ServingSearchReport) -> list[str]:
    """Return that nothing qualifies, what came closest, and what would help it."""
    lines = [f"{title}: no deployment of this space meets the targets"]
    for closest in find_closest(candidate_rows(report.candidates)):
        help_line = f"; what helps: {closest.remedy}" if closest.remedy else ""
        lines.append(f"closest, {closest.name}: {closest.reason}{help_line}")
    return lines


def _ranking(title: str, ranked: Sequence[Row], num_shown: int) -> Table:
    columns = _columns(ranked)
    shown = best_of_layouts(ranked)[:num_shown]
    rows = [[cell(row) for cell in columns.values()] for row in shown]
    return build_table(title, list(columns), rows)


def _columns(ranked: Sequence[Row]) -> dict[str, _Column]:
    """Return the columns; the device and the price only where they tell rows apart."""
    columns: dict[str, _Column] = {
        "rank": lambda row: row["place"],
        "deployment": lambda row: row["name"],
    }
    if len({row["device"] for row in ranked}) > 1:
        columns["device"] = lambda row: row["device"]
    columns[METRICS["num_devices"].title] = METRICS["num_devices"].cell
    if any(row["num_idle_devices"] for row in ranked):
        columns["idle"] = lambda row: row["num_idle_devices"]
    columns |= {
        METRICS[_THROUGHPUT].title: METRICS[_THROUGHPUT].cell,
        "90 % interval": lambda row: " to ".join(
            format_number(row[f"tps_per_gpu_{end}"], 4) for end in ("low", "high")
        ),
        **{METRICS[name].title: METRICS[name].cell for name in ("tps_per_user", *_LATENCIES)},
    }
    if any(row[_COST] > 0 for row in ranked):
        columns[METRICS[_COST].title] = METRICS[_COST].cell
    return columns


def _finalists(finalists: Sequence[Finalist], candidates: CandidateColumns) -> Table:
    columns = (
        "simulated request by request",
        "requests/s",
        METRICS[_THROUGHPUT].title,
        *latency_titles("mean", "p99"),
        "targets",
    )
    rows = [
        (
            finalist.name,
            proposed_rate(finalist),
            *steady_figures(finalist, candidates),
            "met"
            if finalist.is_met
            else "missed: " + ", ".join(missed_outcomes(finalist.outcomes)),
        )
        for finalist in finalists
    ]
    return build_table("", columns, rows)


def _sensitivities(sensitivities: Sequence[Sensitivity]) -> Table:
    return item_table(
        "",
        sensitivities,
        {
            "what if": "change",
            "change": describe_change,
            **{METRICS[name].title: METRICS[name].cell for name in (_THROUGHPUT, *_LATENCIES)},
            "best then": describe_best_then,
        },
    )


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
        lines.append(
            f"{report.num_near:,} are over the limit on TTFT by less than the closed form may be"
            f" wrong: {report.num_near_simulated:,} simulated, {report.num_near_ruled_in:,} ruled"
            f" in and {report.num_near_ruled_out:,} out by simulation"
        )
    if ruled_out:
        words = (f"{count:,} {describe_verdict(name)}" for name, count in ruled_out)
        lines.append(f"ruled out: {', '.join(words)}")
    lines.append(
        f"{report.wall_s:.3g} s, {report.cpu_s:.3g} s of CPU time, {report.num_workers} workers,"
        f" predictor {report.model_version or '(no trained model)'}"
    )
    return lines
