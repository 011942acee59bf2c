"""What the catalog has of a profile by its name: points known, and rows of the same profile."""

import hashlib
import json
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from foretoken.domain import schema
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.name import check_name
from foretoken.domain.operators.spec.operator import all_operators
from foretoken.domain.operators.spec.overlap import is_group_call, is_of_group
from foretoken.domain.ports import CatalogPort
from foretoken.wire.arrow import dims_to_columns, read_table

_NUM_DIGITS = 12


def name_profile(request: ProfileRequest) -> str:
    """Return the request's name, or one made of what it requests: the same for the same.

    A request that skips nothing and has no name is a new profile each time.

    Raises:
        InvalidRequestError: its name is none.

    """
    if request.name:
        return check_name(request.name, "name")
    if not request.skip_covered:
        return uuid.uuid4().hex[:_NUM_DIGITS]
    # How long it may take does not make it another profile.
    content = json.dumps(schema.encode(replace(request, time_cap_s=0.0)), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:_NUM_DIGITS]


# (operator, phase, dtype, variant, kernel source, dimensions in canonical order): the identity of
# a measured point. The kernel of what several ranks time is their library's, and left empty.
Point = tuple[str, str, str, str, str, tuple[int, ...]]

# Under these names a run's environment says which profile it belongs to, and which share of it.
PROFILE_KEY = "profile"
SHARD_KEY = "shard"
# How many calls it was to time, and how many of its share needed no timing.
PLANNED_KEY, SKIPPED_KEY = "num_planned", "num_skipped"

_COLUMNS = (
    *("run_id", "operator", "phase", "dtype", "dims", "topology", "framework_version"),
    *("kernel", "variant", "status", "flags", "latency_us_median"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoverageQuery:
    """Whose points count: of which device, software and links, for which share of which profile."""

    device: str
    framework: str
    framework_version: str
    topology: str = ""
    name: str = ""
    shard_index: int = 0
    num_shards: int = 1

    @property
    def shard(self) -> str:
        """The share as a run's environment has it."""
        return f"{self.shard_index}/{self.num_shards}"


@dataclass(slots=True)
class KnownRows:
    """What is in the catalog.

    `has_run` says whether this share of the profile was recorded before, rows or not. `covered` are
    points with a good row of another profile. `own` counts the rows of this share of the profile,
    failed and flagged ones included, with `medians_us` of those that were timed; `earlier` those of
    the same profile when it was cut into another number of shares.
    """

    has_run: bool = False
    covered: set[Point] = field(default_factory=set)
    own: Counter[Point] = field(default_factory=Counter)
    earlier: Counter[Point] = field(default_factory=Counter)
    medians_us: dict[Point, list[float]] = field(default_factory=lambda: defaultdict(list))


def point_of_call(call: OperatorCall) -> Point:
    """Return the identity of a call, whatever the order of its dimensions."""
    spec = all_operators()[call.operator]
    return (
        call.operator,
        call.phase.name.lower(),
        call.dtype.name.lower(),
        call.variant,
        "" if is_group_call(call) else call.kernel,
        tuple(call.dims[name] for name in spec.dim_names),
    )


def read_coverage(catalog: CatalogPort, query: CoverageQuery) -> KnownRows:
    """Return what the catalog has, in one question about rows and one about runs.

    Raises:
        ForetokenError: whatever the catalog raises.

    """
    shards = {
        summary.run.run_id: summary.run.environment.get(SHARD_KEY, "0/1")
        for summary in catalog.list_runs()
        if query.name
        and summary.run.environment.get(PROFILE_KEY) == query.name
        and summary.run.environment.get("device") == query.device
    }
    selection = MeasurementFilter(
        device=query.device,
        framework=query.framework,
        include_failed=bool(shards),
        include_flagged=bool(shards),
    )
    table = read_table(catalog.read_measurements(selection)).select(_COLUMNS)
    is_same = pc.equal(table.column("framework_version"), query.framework_version)
    known = KnownRows(has_run=query.shard in shards.values())
    for operator, rows in _by_operator(table.filter(is_same)):
        _add_rows(known, operator, rows, query, shards)
    return known


def _by_operator(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    for operator in pc.unique(table.column("operator")).to_pylist():
        if operator in all_operators():
            yield operator, table.filter(pc.equal(table.column("operator"), operator))


def _add_rows(
    known: KnownRows,
    operator: str,
    rows: pa.Table,
    query: CoverageQuery,
    shards: Mapping[str, str],
) -> None:
    spec = all_operators()[operator]
    if spec.is_collective:
        rows = rows.filter(pc.equal(pc.fill_null(rows.column("topology"), ""), query.topology))
    dims = zip(
        *(column.tolist() for column in dims_to_columns(rows, spec.dim_names).values()), strict=True
    )
    names = ("run_id", "phase", "dtype", "kernel", "variant", "status", "latency_us_median")
    columns = (rows.column(name).to_pylist() for name in names)
    flagged = [bool(flags) for flags in rows.column("flags").to_pylist()]
    for run_id, phase, dtype, kernel, variant, status, median_us, is_flagged, values in zip(
        *columns, flagged, dims, strict=True
    ):
        source = "" if is_of_group(operator, variant) else kernel or ""
        point = (operator, phase, dtype, variant or "", source, values)
        shard = shards.get(run_id)
        if shard is None:
            if status == "ok" and not is_flagged:
                known.covered.add(point)
        elif shard == query.shard:
            known.own[point] += 1
            if median_us is not None:
                known.medians_us[point].append(median_us)
        elif shard.partition("/")[2] != str(query.num_shards):
            known.earlier[point] += 1
