"""Times of collectives as the catalog has them, and the tables made of them."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.app.cli.collective_calls import format_size
from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import CliState, build_table, note
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.measurements.profiling import ProfileReport
from foretoken.domain.operators.spec.collective import Bandwidth, bandwidth_of
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.overlap import (
    call_alone,
    find_companion,
    group_of_call,
    plain_call,
)
from foretoken.domain.ports import CatalogPort
from foretoken.wire.arrow import read_table

_BYTES_PER_GB = 1e9

# What tells calls apart.
Key = tuple[str, str, str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One call as it was timed, in µs; of several measurements the middle one."""

    call: OperatorCall
    latency_us_median: float
    latency_us_p10: float
    latency_us_p90: float
    num_samples: int

    @property
    def bandwidth(self) -> Bandwidth:
        """Bandwidths of a collective."""
        return bandwidth_of(self.call.operator, self.call.dims, self.latency_us_median)

    @property
    def bus_gb_per_s(self) -> float:
        """Bus bandwidth in GB/s."""
        return self.bandwidth.bus_bytes_per_s / _BYTES_PER_GB


def find_timings(
    catalog: CatalogPort, report: ProfileReport, calls: Sequence[OperatorCall]
) -> dict[Key, Timing]:
    """Return the timings of calls: this profile's where there are, else earlier ones."""
    wanted = {key_of(call): call for call in calls}
    found: dict[Key, Timing] = {}
    for operator in sorted({call.operator for call in calls}):
        selection = MeasurementFilter(
            operator=operator, device=report.device, framework="torch", include_flagged=True
        )
        own = MeasurementFilter(operator=operator, run_id=report.run_id, include_flagged=True)
        for each in (own, selection) if report.run_id else (selection,):
            for key, timing in _read(catalog, each, wanted).items():
                found.setdefault(key, timing)
    return {key: found[key] for key in wanted if key in found}


def key_of(call: OperatorCall) -> Key:
    """Return what tells a call apart, whatever the order of its dimensions."""
    return call.operator, call.dtype.name.lower(), call.variant, tuple(sorted(call.dims.items()))


def print_bandwidths(state: CliState, timings: Mapping[Key, Timing]) -> None:
    """Print the time and the bandwidths of each collective."""
    columns = (
        "operator",
        "group",
        "size",
        "median (µs)",
        "P10 (µs)",
        "P90 (µs)",
        "algorithm (GB/s)",
        "bus (GB/s)",
    )
    state.print_rows("Collectives", columns, [_bandwidth_row(t) for t in timings.values()])


def print_overlaps(
    state: CliState, timings: Mapping[Key, Timing], calls: Iterable[OperatorCall]
) -> None:
    """Print how much a product and each collective slow each other down."""
    rows = [row for call in calls for row in _overlap_rows(call, timings)]
    columns = (
        "product",
        "beside",
        "group",
        "size",
        "product alone (µs)",
        "beside (µs)",
        "slower by",
        "collective alone (µs)",
        "beside (µs)",
        "slower by",
    )
    if state.is_json:
        names = (
            *columns[:4],
            "product_us",
            "product_beside_us",
            "product_ratio",
            "collective_us",
            "collective_beside_us",
            "collective_ratio",
        )
        state.print_rows("Overlap", names, rows)
        return
    ratios = [float(row[6]) for row in rows]
    advice = []
    if ratios:
        advice.append(
            f"computation beside communication takes {statistics.median(ratios):.2f} times as long"
            " (the middle of these): a trainer's rule overlap_slowdown_ratio"
        )
    state.print_object(rows, lambda: stack(build_table("Overlap", columns, rows), *advice))
    if not rows:
        note("nothing was timed both alone and beside something")


def describe_group(call: OperatorCall) -> str:
    """Return a group as (devices per node)x(nodes)."""
    return "x".join(str(count) for count in group_of_call(call))


def _read(
    catalog: CatalogPort, selection: MeasurementFilter, wanted: Mapping[Key, OperatorCall]
) -> dict[Key, Timing]:
    rows: dict[Key, list[Mapping[str, Any]]] = {}
    for row in read_table(catalog.read_measurements(selection)).to_pylist():
        dims = tuple(sorted(dict(row["dims"]).items()))
        key = (row["operator"], row["dtype"], row["variant"] or "", dims)
        if key in wanted and row["phase"] == "forward":
            rows.setdefault(key, []).append(row)
    return {key: _timing(wanted[key], same) for key, same in rows.items()}


def _timing(call: OperatorCall, rows: Sequence[Mapping[str, Any]]) -> Timing:
    ordered = sorted(rows, key=lambda row: float(row["latency_us_median"]))
    middle = ordered[(len(ordered) - 1) // 2]
    median_us = float(middle["latency_us_median"])
    return Timing(
        call=call,
        latency_us_median=median_us,
        latency_us_p10=float(middle["latency_us_p10"] or median_us),
        latency_us_p90=float(middle["latency_us_p90"] or median_us),
        num_samples=int(middle["num_samples"] or 0),
    )


def _bandwidth_row(timing: Timing) -> tuple[object, ...]:
    call = timing.call
    return (
        call.operator,
        describe_group(call),
        format_size(call.dims["message_bytes"]),
        timing.latency_us_median,
        timing.latency_us_p10,
        timing.latency_us_p90,
        timing.bandwidth.algorithm_bytes_per_s / _BYTES_PER_GB,
        timing.bus_gb_per_s,
    )


def _overlap_rows(
    call: OperatorCall, timings: Mapping[Key, Timing]
) -> Iterator[tuple[str, str, str, str, float, float, float, float, float, float]]:
    """Yield the row of a product beside a collective, where all four times of it are there."""
    collective = find_companion(call)
    if collective is None or not find_operator(collective.operator).is_collective:
        return
    product = plain_call(call)
    reverses = (
        timing
        for timing in timings.values()
        if timing.call.operator == collective.operator
        and timing.call.dims == collective.dims
        and find_companion(timing.call) == product
    )
    reverse = next(reverses, None)
    alone = timings.get(key_of(call_alone(product, *group_of_call(call))))
    beside = timings.get(key_of(call))
    collective_alone = timings.get(key_of(plain_call(reverse.call))) if reverse else None
    if not (alone and beside and reverse and collective_alone):
        return
    yield (
        "x".join(str(side) for side in product.dims.values()),
        collective.operator,
        describe_group(call),
        format_size(collective.dims["message_bytes"]),
        alone.latency_us_median,
        beside.latency_us_median,
        beside.latency_us_median / alone.latency_us_median,
        collective_alone.latency_us_median,
        reverse.latency_us_median,
        reverse.latency_us_median / collective_alone.latency_us_median,
    )
