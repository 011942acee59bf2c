"""Collectives: which to time, their times in the catalog, and pictures of their bandwidths."""

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.app.cli.state import CliState, build_table, note, stack
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.measurements.profiling import ProfileReport
from foretoken.domain.operators.spec.collective import Bandwidth, bandwidth_of, variant_of_group
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.overlap import (
    call_alone,
    call_during,
    find_companion,
    group_of_call,
    plain_call,
)
from foretoken.domain.operators.spec.sweep import powers_of_two
from foretoken.domain.ports import CatalogPort
from foretoken.domain.units import GIB
from foretoken.page.block import Chart, Column
from foretoken.page.chart import Plot
from foretoken.page.curve import Curve, draw_curves
from foretoken.wire.arrow import read_table

_KIB, _MIB = 2**10, 2**20
_UNITS = {"": 1, "B": 1, "KiB": _KIB, "MiB": _MIB, "GiB": GIB}
_SIZE = re.compile(r"(\d+)([A-Za-z]*)")
_FEWEST_RANKS = 2
_NUM_SIDES = 3
_BYTES_PER_GB = 1e9

# What tells calls apart.
Key = tuple[str, str, str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveChoice:
    """Collectives, and the sizes and groups (devices of a node x nodes) to time each for."""

    operators: tuple[str, ...]
    dtype: DType
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    sizes: tuple[int, ...]

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield (devices per node, nodes) of every group with somebody to talk to."""
        for group in itertools.product(self.ranks, self.nodes):
            if math.prod(group) >= _FEWEST_RANKS:
                yield group


def bandwidth_calls(choice: CollectiveChoice) -> tuple[OperatorCall, ...]:
    """Return each collective in each size for each group; transfers of more than a pair as a ring.

    Raises:
        InvalidRequestError: no group has two ranks.

    """
    found = tuple(
        _collective(operator, size, group, choice.dtype)
        for operator in choice.operators
        for group in choice.groups()
        for size in choice.sizes
    )
    if not found:
        raise InvalidRequestError.of_field("ranks", "a group needs at least two ranks")
    return found


def overlap_calls(choice: CollectiveChoice, gemm: OperatorCall) -> tuple[OperatorCall, ...]:
    """Return the product alone, each collective alone, and each next to the other."""
    found: list[OperatorCall] = []
    product = OperatorCall(operator=gemm.operator, dtype=choice.dtype, dims=gemm.dims)
    for group in choice.groups():
        found.append(call_alone(product, *group))
        for operator, size in itertools.product(choice.operators, choice.sizes):
            collective = _collective(operator, size, group, choice.dtype)
            found += [
                collective,
                call_during(product, collective),
                call_during(collective, product),
            ]
    return tuple(found)


def gemm_of_text(text: str) -> OperatorCall:
    """Return the product that `MxNxK` says.

    Raises:
        InvalidRequestError: it says none.

    """
    words = text.split("x")
    if len(words) != _NUM_SIDES or not all(word.isascii() and word.isdigit() for word in words):
        raise InvalidRequestError.of_field("gemm", f"{text!r} is not MxNxK, as in 512x512x512")
    dims = dict(zip(("m", "n", "k"), map(int, words), strict=True))
    return OperatorCall(operator="gemm", dtype=DType.FP32, dims=dims)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the bytes that `1KiB:1GiB` (doubling) or `64KiB,1MiB` say, ascending.

    Raises:
        InvalidRequestError: a part is no size or range.

    """
    sizes: set[int] = set()
    for part in text.split(","):
        bounds = [_bytes_of(word) for word in part.split(":")]
        match bounds:
            case [size]:
                sizes.add(size)
            case [first, last] if first <= last:
                sizes.update(first * factor for factor in powers_of_two(1, last // first))
            case _:
                raise InvalidRequestError.of_field("sizes", f"{part!r} is not FIRST:LAST")
    return tuple(sorted(sizes))


def format_size(size: int) -> str:
    """Return bytes as people say them."""
    for unit, factor in (("GiB", GIB), ("MiB", _MIB), ("KiB", _KIB)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def _collective(operator: str, size: int, group: tuple[int, int], dtype: DType) -> OperatorCall:
    devices_per_node, num_nodes = group
    return OperatorCall(
        operator=operator,
        dtype=dtype,
        dims={
            "message_bytes": size,
            "devices_per_node": devices_per_node,
            "num_nodes": num_nodes,
        },
        variant=variant_of_group(operator, math.prod(group)),
    )


def _bytes_of(word: str) -> int:
    found = _SIZE.fullmatch(word.strip())
    if found is None or found[2] not in _UNITS or int(found[1]) == 0:
        raise InvalidRequestError.of_field("sizes", f"{word!r} is no size, as 64KiB or 1MiB is")
    return int(found[1]) * int(_UNITS[found[2]])


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
        "next to it (µs)",
        "slower by",
        "collective alone (µs)",
        "next to it (µs)",
        "slower by",
    )
    if state.is_data:
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
            f"computation next to communication takes {statistics.median(ratios):.2f} times as long"
            " (the middle of these): a trainer's rule overlap_slowdown_ratio"
        )
    state.print_object(rows, lambda: stack(build_table("Overlap", columns, rows), *advice))
    if not rows:
        note("nothing was timed both alone and next to something")


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
    """Yield the row of a product next to a collective, where all four times of it are there."""
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
    during = timings.get(key_of(call))
    collective_alone = timings.get(key_of(plain_call(reverse.call))) if reverse else None
    if not (alone and during and reverse and collective_alone):
        return
    yield (
        "x".join(str(side) for side in product.dims.values()),
        collective.operator,
        describe_group(call),
        format_size(collective.dims["message_bytes"]),
        alone.latency_us_median,
        during.latency_us_median,
        during.latency_us_median / alone.latency_us_median,
        collective_alone.latency_us_median,
        reverse.latency_us_median,
        reverse.latency_us_median / collective_alone.latency_us_median,
    )


def bandwidth_chart(timings: Mapping[Key, Timing]) -> Chart:
    """Return bus bandwidth over message size: a line per operator and group."""
    curves = []
    for (operator, group), points in group_lines(timings).items():
        sizes, rates = zip(*points, strict=True)
        curves.append(Curve(label=f"{operator} {group}", x=sizes, y=rates))
    title = "What a rank sends over the time it takes; groups are devices x nodes"
    x, y = Column(title="message (bytes)", name="size"), Column(title="bus bandwidth (GB/s)")
    return draw_curves(Plot(title=title, height=400), curves, x=x, y=y)


def group_lines(
    timings: Mapping[Key, Timing],
) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return (size in bytes, bus bandwidth in GB/s) by operator and group, ascending."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for timing in timings.values():
        place = (timing.call.operator, describe_group(timing.call))
        point = (timing.call.dims["message_bytes"], timing.bus_gb_per_s)
        lines.setdefault(place, []).append(point)
    return {place: sorted(points) for place, points in lines.items()}
