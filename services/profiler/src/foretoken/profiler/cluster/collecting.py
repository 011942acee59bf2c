"""What the pods of a profile have recorded so far, read from the catalog."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from foretoken.domain.measurements.measurement import MeasurementFilter, RunKind, RunSummary
from foretoken.domain.measurements.profiling import OperatorProfile, ProfileReport
from foretoken.domain.ports import CatalogPort
from foretoken.profiler.planning.coverage import (
    PLANNED_KEY,
    PROFILE_KEY,
    SHARD_KEY,
    SKIPPED_KEY,
)
from foretoken.profiler.report import failure_notes, repeat_differences
from foretoken.wire.arrow import read_table

_POINT_COLUMNS = ("operator", "phase", "dtype", "kernel", "variant")
_ROW_COLUMNS = (
    *("dims", "status", "status_reason", "flags", "num_samples"),
    *("latency_us_median", "latency_us_p10", "latency_us_p90"),
)
# Of a normal distribution: 95 % of its mass lie within so many deviations of the mean, 80 % (from
# p10 to p90) in a width of so many, and a median scatters by so much more than a mean.
_DEVIATIONS_95, _DEVIATIONS_P10_P90, _MEDIAN_SCATTER = 1.96, 2.563, 1.2533


def find_runs(catalog: CatalogPort, name: str) -> tuple[RunSummary, ...]:
    """Return the runs of a profile, newest first."""
    return tuple(
        summary
        for summary in catalog.list_runs()
        if summary.run.kind is RunKind.PROFILE and summary.run.environment.get(PROFILE_KEY) == name
    )


def count_rows(runs: Iterable[RunSummary]) -> tuple[int, int]:
    """Return how many calls were recorded and how many the shards seen so far have planned."""
    counts = [
        (sum(summary.num_rows for summary in own), _num_planned(own))
        for own in _by_shard(runs).values()
    ]
    # Rows beyond the plan are of calls that were timed again.
    num_recorded = sum(min(recorded, planned or recorded) for recorded, planned in counts)
    return num_recorded, sum(planned for _, planned in counts)


def find_silent_shards(
    catalog: CatalogPort, name: str, num_pods: int, *, is_group: bool
) -> tuple[int, ...]:
    """Return the pods of a profile's Job of which the catalog has no run, not one without rows.

    Of pods that time together the first records for all.
    """
    recorded = {summary.run.environment.get(SHARD_KEY) for summary in find_runs(catalog, name)}
    num_shards = 1 if is_group else num_pods
    return tuple(i for i in range(num_shards) if f"{i}/{num_shards}" not in recorded)


def build_report(catalog: CatalogPort, name: str, device: str, wall_s: float) -> ProfileReport:
    """Return the outcome of a profile by what is in the catalog, whichever pod brought it."""
    runs = find_runs(catalog, name)
    rows: list[Mapping[str, Any]] = []
    for own in _by_shard(runs).values():
        found = [row for summary in own for row in _read_rows(catalog, summary.run.run_id)]
        rows += _drop_doubted(found, len(found) - (_num_planned(own) or len(found)))
    num_recorded, num_planned = count_rows(runs)
    num_planned = max(num_planned, num_recorded)
    num_skipped = _num_skipped(runs)
    measured = [row for row in rows if row["status"] == "ok"]
    differences = _differences(measured)
    return ProfileReport(
        run_id=runs[0].run.run_id if len(runs) == 1 else "",
        device=device,
        num_planned=num_planned + num_skipped,
        num_measured=len(measured),
        num_failed=len(rows) - len(measured),
        num_skipped=num_planned - num_recorded + num_skipped,
        wall_s=wall_s,
        name=name,
        num_flagged=sum(bool(row["flags"]) for row in rows),
        num_repeats=len(differences),
        repeat_median_ratio=median(differences) if differences else 0.0,
        repeat_p90_ratio=_percentile_90(differences),
        operators=_by_operator(rows),
        notes=failure_notes(_reasons(rows)),
    )


def _reasons(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return how many calls failed for each reason."""
    return Counter(
        f"{row['operator']}: {row['status_reason']}" for row in rows if row["status"] != "ok"
    )


def _by_shard(runs: Iterable[RunSummary]) -> Mapping[str, Sequence[RunSummary]]:
    """Return the runs of each shard, oldest first: one that was tried again has several."""
    found: dict[str, list[RunSummary]] = {}
    for summary in reversed(tuple(runs)):
        shard = summary.run.environment.get(SHARD_KEY, summary.run.run_id)
        found.setdefault(shard, []).append(summary)
    return found


def _num_planned(runs: Iterable[RunSummary]) -> int:
    """Return what a shard planned at first; when it was tried again it was less."""
    return max(int(summary.run.environment.get(PLANNED_KEY, 0)) for summary in runs)


def _num_skipped(runs: Sequence[RunSummary]) -> int:
    """Return what needed no timing when the shards of the newest Job began."""
    cuts = [summary.run.environment.get(SHARD_KEY, "").partition("/")[2] for summary in runs]
    newest = [summary for summary, cut in zip(runs, cuts, strict=True) if cut == cuts[0]]
    return sum(
        int(own[0].run.environment.get(SKIPPED_KEY, 0)) for own in _by_shard(newest).values()
    )


def _drop_doubted(rows: Sequence[Mapping[str, Any]], num_dropped: int) -> list[Mapping[str, Any]]:
    """Return rows but so many flagged ones whose calls were timed again after them."""
    later = Counter(_point_of_row(row) for row in rows)
    kept = []
    for row in rows:
        point = _point_of_row(row)
        later[point] -= 1
        if num_dropped > 0 and row["flags"] and later[point]:
            num_dropped -= 1
        else:
            kept.append(row)
    return kept


def _point_of_row(row: Mapping[str, Any]) -> tuple[object, ...]:
    dims = tuple(sorted(dict(row["dims"]).items()))
    return (*(row[name] for name in _POINT_COLUMNS), dims)


def _read_rows(catalog: CatalogPort, run_id: str) -> Iterator[Mapping[str, Any]]:
    selection = MeasurementFilter(run_id=run_id, include_failed=True, include_flagged=True)
    table = read_table(catalog.read_measurements(selection))
    columns = (*_POINT_COLUMNS, *_ROW_COLUMNS)
    values = (table.column(name).to_pylist() for name in columns)
    for row in zip(*values, strict=True):
        yield dict(zip(columns, row, strict=True))


def _differences(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return by how much the medians of points timed twice differ, over their mean."""
    latencies: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        latencies.setdefault(_point_of_row(row), []).append(row["latency_us_median"])
    return repeat_differences(latencies.values())


def _percentile_90(values: Sequence[float]) -> float:
    if len(values) < 2:  # noqa: PLR2004 - one value is every percentile of itself
        return values[0] if values else 0.0
    return quantiles(values, n=10, method="inclusive")[-1]


def _by_operator(rows: Sequence[Mapping[str, Any]]) -> tuple[OperatorProfile, ...]:
    rows_by_operator: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_by_operator.setdefault(row["operator"], []).append(row)
    return tuple(_summarize(name, own) for name, own in sorted(rows_by_operator.items()))


def _summarize(operator: str, rows: Sequence[Mapping[str, Any]]) -> OperatorProfile:
    num_measured = sum(row["status"] == "ok" for row in rows)
    ratios = [ratio for ratio in map(_interval_ratio, rows) if ratio is not None]
    return OperatorProfile(
        operator=operator,
        num_measured=num_measured,
        num_failed=len(rows) - num_measured,
        num_flagged=sum(bool(row["flags"]) for row in rows),
        interval_ratio=median(ratios) if ratios else 0.0,
    )


def _interval_ratio(row: Mapping[str, Any]) -> float | None:
    """Return half the width of the median's 95 % interval over it, as of normal noise.

    Rows do not keep the interval itself, only what it can be estimated from.
    """
    parts = [row[name] for name in _ROW_COLUMNS[-4:]]
    if not all(parts):
        return None
    num_samples, median_us, p10_us, p90_us = parts
    deviation_us = (p90_us - p10_us) / _DEVIATIONS_P10_P90
    scatter_us = _MEDIAN_SCATTER * deviation_us / num_samples**0.5
    return float(_DEVIATIONS_95 * scatter_us / median_us)
