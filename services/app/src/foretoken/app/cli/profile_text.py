"""Outlines and reports of profiles, for a terminal."""

from collections.abc import Sequence

from rich.table import Table

from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import build_table
from foretoken.domain.measurements.profiling import ProfileOutline, ProfileReport
from foretoken.domain.units import describe_seconds


def outline_table(outline: ProfileOutline) -> Table:
    """Return what a profile would time: by operator, and in all."""
    rows = [
        (entry.operator, entry.num_calls, entry.num_covered, round(entry.estimated_s, 1))
        for entry in outline.operators
    ]
    table = build_table(
        f"Profile {outline.name} on {outline.device}",
        ("operator", "to time", "known", "about (s)"),
        rows,
    )
    seconds = describe_seconds(outline.estimated_s)
    known = f"; {outline.num_covered:,} are known already" if outline.num_covered else ""
    remarks = [f"{outline.num_calls:,} calls to time in about {seconds}{known}"]
    if outline.num_too_long:
        remarks.append(f"{outline.num_too_long:,} take too long and are left out")
    if outline.num_failing:
        remarks.append(f"{outline.num_failing:,} will not fit the memory and be failed rows")
    return _below(table, outline.operators, [*remarks, *outline.notes])


def report_table(report: ProfileReport) -> Table:
    """Return what came of a profile: by operator, and in all."""
    rows = [
        (
            entry.operator,
            entry.num_measured,
            entry.num_failed,
            entry.num_flagged,
            round(entry.wall_s, 1),
            f"{entry.interval_ratio:.2%}" if entry.interval_ratio else "-",
        )
        for entry in report.operators
    ]
    columns = ("operator", "measured", "failed", "doubted", "seconds", "interval ±")
    table = build_table(f"Profile {report.name} on {report.device}", columns, rows)
    skipped = f", {report.num_skipped:,} known, too long or left" if report.num_skipped else ""
    counts = f"{report.num_measured:,} measured, {report.num_failed:,} failed{skipped}"
    remarks = [f"{counts}, in {describe_seconds(report.wall_s)}"]
    if report.num_repeats:
        remarks.append(
            f"repeatability: {report.num_repeats:,} points timed twice differ by"
            f" {report.repeat_median_ratio:.2%} in the median, {report.repeat_p90_ratio:.2%} at P90"
        )
    if report.run_id:
        remarks.append(f"recorded as run {report.run_id}")
    return _below(table, report.operators, [*remarks, *report.notes])


def _below(table: Table, rows: Sequence[object], remarks: Sequence[str]) -> Table:
    """Return the remarks below a table, alone where it has no rows."""
    return stack(table, *remarks) if rows else stack(*remarks)
