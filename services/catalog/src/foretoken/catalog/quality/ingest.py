"""Judge rows one by one as they arrive: those that failed, and those that cannot be true.

A failed row has no times; a flagged one keeps them, with the reason, and is not trained on.
Whether rows fit each other is judged when they are stored (`reviews.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats, OperatorRows
from foretoken.catalog.quality.bound import Subject, bounds_of
from foretoken.catalog.quality.flag import Coded, RowFlags, code_columns, split_by_code
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.wire.arrow import LATENCY_STATISTICS

INCONSISTENT = "inconsistent_statistics"
# (statistic that must not be larger, than this one)
_ORDER = (
    ("min", "p10"),
    ("min", "median"),
    ("min", "mean"),
    ("p10", "median"),
    ("median", "p90"),
    ("p10", "p90"),
    ("median", "max"),
    ("mean", "max"),
    ("p90", "max"),
    ("min", "max"),
)
# Tables round their columns apart.
_ROUNDING_RATIO = 1e-3


def flag_inconsistent(table: pa.Table, flags: RowFlags) -> None:
    """Flag rows with a statistic that another forbids, or a negative spread."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for pair in _ORDER for name in pair):
        column = table.column(f"latency_us_{name}")
        if column.null_count < len(column):
            columns[name] = column.to_numpy()
    seen = np.zeros(table.num_rows, dtype=bool)
    with np.errstate(invalid="ignore"):  # a statistic that is missing contradicts nothing
        for small, large in _ORDER:
            if small in columns and large in columns:
                low, high = columns[small], columns[large]
                wrong = (low > high * (1 + _ROUNDING_RATIO)) & ~seen
                seen |= wrong
                for row in np.flatnonzero(wrong).tolist():
                    flags.add(
                        row,
                        f"{INCONSISTENT}: {small} of {low[row]:.4g} us above {large} of "
                        f"{high[row]:.4g} us",
                    )
    _flag_negative_std(table, flags)


def _flag_negative_std(table: pa.Table, flags: RowFlags) -> None:
    column = table.column("latency_us_std")
    if column.null_count == len(column):
        return
    deviation = column.to_numpy()
    with np.errstate(invalid="ignore"):
        for row in np.flatnonzero(deviation < 0).tolist():
            flags.add(row, f"{INCONSISTENT}: std of {deviation[row]:.4g} us is negative")


# What a row may take of its limits. Work and messages are counted exactly, clocks may pass the data
# sheet's; of the memory traffic a fused or approximate kernel may spare half.
_PEAK_RATIO_MAX = 1.15
_BANDWIDTH_RATIO_MAX = 2.0

# The flag of a time that no device can reach.
IMPOSSIBLE = "faster_than_physics"
# What the flags given here mean.
INGEST_TESTS: Mapping[str, str] = {
    IMPOSSIBLE: "faster than the device's peak, its memory or its links allow",
    INCONSISTENT: "of statistics that contradict each other",
}
_LATENCY_COLUMNS = tuple(f"latency_us_{statistic}" for statistic in LATENCY_STATISTICS)
_SUBJECT_COLUMNS = ("device", "topology", "dtype", "phase", "variant")
_WORDS: Mapping[str, tuple[str, ...]] = {
    "status": ("ok", "failed"),
    "dtype": tuple(dtype.name.lower() for dtype in DType),
    "phase": tuple(phase.name.lower() for phase in Phase),
}


@dataclass(frozen=True, slots=True)
class Judged:
    """A table with its failures and flags written in, and how many there are."""

    table: pa.Table
    num_flagged: int
    num_failed: int


def judge(table: pa.Table, groups: Sequence[OperatorRows]) -> Judged:
    """Return the table with failed rows emptied and suspect rows flagged; keep given flags.

    Raises:
        UnknownDeviceError: a row's device has no file.
        UnknownTopologyError: a collective's topology has no file.
        InvalidRequestError: a status, dtype or phase that does not exist, a variant that cannot
            be read, or a collective without topology; the message names the row.

    """
    if not table.num_rows:
        return Judged(table, 0, 0)
    coded = code_columns(table, ("status", *_SUBJECT_COLUMNS))
    for name, known in _WORDS.items():
        _check_words(name, coded[name], known)
    latency_us = table.column("latency_us_median").to_numpy()
    was_ok = coded["status"].is_value("ok")
    is_ok = was_ok & np.isfinite(latency_us) & (latency_us > 0)
    num_failed = table.num_rows - int(np.count_nonzero(is_ok))
    if num_failed:
        table = _fail(table, is_ok, was_ok)
    flags = RowFlags()
    flag_inconsistent(table, flags)
    for group, subject in _split(groups, coded):
        times_us = latency_us[group.indices]
        with np.errstate(invalid="ignore"):  # failed rows have no time
            _flag_impossible(group, subject, times_us, flags)
    table, num_flagged = flags.write_into(table)
    return Judged(table, num_flagged, num_failed)


def _check_words(name: str, column: Coded, known: tuple[str, ...]) -> None:
    for code, word in enumerate(column.values):
        if word not in known:
            row = int(np.argmax(column.codes == code))
            raise InvalidRequestError.of_field(
                name, f"row {row}: {word!r} is not one of {', '.join(known)}"
            )


def _fail(table: pa.Table, is_ok: np.ndarray, was_ok: np.ndarray) -> pa.Table:
    """Empty the times of failed rows; give a reason to those that have none."""
    import pyarrow.compute as pc  # takes long to load

    medians = table.column("latency_us_median")
    reasons = table.column("status_reason").combine_chunks()
    newly = np.flatnonzero(was_ok & ~is_ok)
    if len(newly):
        said = np.full(table.num_rows, None, dtype=object)
        said[newly] = [_reason_of(value) for value in medians.take(newly).to_pylist()]
        reasons = pc.if_else(pa.array(was_ok & ~is_ok), pa.array(said, pa.string()), reasons)
    lacks_reason = pc.and_(pa.array(~is_ok), pc.is_null(reasons))
    columns = {
        "status": pc.if_else(pa.array(is_ok), "ok", "failed"),
        "status_reason": pc.if_else(lacks_reason, "no reason given", reasons),
    }
    for name in _LATENCY_COLUMNS:
        columns[name] = pc.if_else(
            pa.array(is_ok), table.column(name), pa.scalar(None, pa.float64())
        )
    for name, column in columns.items():
        position = table.schema.get_field_index(name)
        table = table.set_column(position, table.schema.field(name), column)
    return table


def _reason_of(median_us: float | None) -> str:
    return "the latency is missing" if median_us is None else f"latency of {median_us} us"


def _split(
    groups: Sequence[OperatorRows], coded: Mapping[str, Coded]
) -> Iterator[tuple[OperatorRows, Subject]]:
    """Yield the rows of each operator that share what bounds them."""
    columns = [coded[name] for name in _SUBJECT_COLUMNS]
    for group in groups:
        for places, values in split_by_code(columns, group.indices):
            device, topology, dtype, phase, variant = values
            subject = Subject(device or "", topology, dtype or "", phase or "", variant)
            if len(places) == len(group.indices):
                part = group
            else:
                dims = {name: column[places] for name, column in group.columns.items()}
                part = OperatorRows(group.spec, group.indices[places], dims)
            if group.spec.is_collective and subject.topology is None:
                raise InvalidRequestError.of_field(
                    "topology", f"row {part.indices[0]}: {group.spec.name} needs a topology"
                )
            yield part, subject


def _flag_impossible(
    group: OperatorRows, subject: Subject, times_us: Floats, flags: RowFlags
) -> None:
    """Flag rows faster than the peak FLOP/s, the memory or the links allow."""
    bounds = bounds_of(group.spec, group.columns, subject)
    moved_us = (bounds.memory_us - bounds.cached_us) / _BANDWIDTH_RATIO_MAX
    least_us = np.maximum(bounds.exact_us / _PEAK_RATIO_MAX, moved_us)
    for place in np.flatnonzero(times_us < least_us).tolist():
        needed_us = bounds.least_us[place]
        flags.add(
            int(group.indices[place]),
            f"{IMPOSSIBLE}: {times_us[place]:.4g} us where {subject.device} needs at least "
            f"{needed_us:.4g} us",
        )
