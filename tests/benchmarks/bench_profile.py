"""Cases and seconds per operator of a profile, and how far it repeats when it is run again.

Run: python tests/benchmarks/bench_profile.py [--device cpu] [--model MODEL] [--tp 1,2] [--full]

Profiles the same plan twice, one run after the other, into a catalog of its own. The difference at
a point is that of the two medians over their mean; a flagged point is flagged in one of the runs.
Peers print no such figure; the design requires 0.4-0.8 % in the median and 1.4-3.4 % at P90 on a
GPU. Other work on the machine shows on a CPU.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.app import front
from foretoken.client.facade import Foretoken
from foretoken.domain.job import Job
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.measurements.profiling import ProfileReport, ProfileRequest
from foretoken.domain.models.architecture import find_model
from foretoken.wire.arrow import read_table

# (operator, number format, pass, variant, kernel, dimensions)
Point = tuple[str, str, str, str, str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class Timed:
    """What one run says of a point."""

    latency_us: float
    is_flagged: bool


def main() -> None:
    """Profile twice and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--tp", default="1")
    parser.add_argument("--full", action="store_true", help="the full plan, not the quick one")
    given = parser.parse_args()
    request = ProfileRequest(
        device=given.device,
        models=(find_model(given.model),),
        tp_sizes=tuple(int(size) for size in given.tp.split(",")),
        has_training=True,
        quick=not given.full,
        skip_covered=False,
    )
    with tempfile.TemporaryDirectory() as home, front.open(home) as foretoken:
        outline = foretoken.profiler.outline_profile(request)
        print(f"{given.model} on {given.device}: {outline.num_calls} cases, ", end="")
        print(f"predicted to take {outline.estimated_s:.0f} s")
        reports = [foretoken.profile(request, on_progress=_ignore) for _ in range(2)]
        runs = [_read_run(foretoken, report) for report in reports]
    _print_operators(reports[0], runs)


def _ignore(_job: Job) -> None:
    """Show nothing: a progress bar would stand between the figures."""


def _read_run(foretoken: Foretoken, report: ProfileReport) -> dict[Point, Timed]:
    selection = MeasurementFilter(run_id=report.run_id, include_flagged=True)
    found: dict[Point, list[Timed]] = {}
    for row in read_table(foretoken.catalog.read_measurements(selection)).to_pylist():
        names = (row["operator"], row["dtype"], row["phase"], row["variant"], row["kernel"])
        point = (*(name or "" for name in names), tuple(sorted(dict(row["dims"]).items())))
        timed = Timed(row["latency_us_median"], bool(row["flags"]))
        found.setdefault(point, []).append(timed)
    return {point: times[0] for point, times in found.items()}


def _print_operators(report: ProfileReport, runs: Sequence[Mapping[Point, Timed]]) -> None:
    first, second = runs
    both = [point for point in first if point in second]
    title = f"{'operator':<24}{'cases':>7}{'failed':>8}{'s':>8}{'s/case':>8}{'interval':>10}"
    print(f"{title}{'median':>9}{'P90':>8}")
    for operator in report.operators:
        num_cases = operator.num_measured + operator.num_failed
        differences = _differences([point for point in both if point[0] == operator.operator], runs)
        print(
            f"{operator.operator:<24}{num_cases:>7}{operator.num_failed:>8}{operator.wall_s:>8.1f}"
            f"{operator.wall_s / max(num_cases, 1):>8.2f}{operator.interval_ratio:>10.2%}",
            _format_quantiles(differences),
        )
    quiet = [p for p in both if not (first[p].is_flagged or second[p].is_flagged)]
    print(f"whole profile: {report.num_measured} measured in {report.wall_s:.0f} s")
    print(f"all {len(both)} points, second run against first: ", end="")
    print(_format_quantiles(_differences(both, runs)).strip())
    print(f"the {len(quiet)} points flagged in neither run:    ", end="")
    print(_format_quantiles(_differences(quiet, runs)).strip())


def _differences(points: Sequence[Point], runs: Sequence[Mapping[Point, Timed]]) -> list[float]:
    pairs = [tuple(run[point].latency_us for run in runs) for point in points]
    return [2 * abs(a - b) / (a + b) for a, b in pairs if a and b]


def _format_quantiles(differences: Sequence[float]) -> str:
    if not differences:
        return f"{'-':>8}{'-':>8}"
    median, p90 = np.percentile(differences, [50, 90])
    return f"{median:>8.2%}{p90:>8.2%}"


if __name__ == "__main__":
    main()
