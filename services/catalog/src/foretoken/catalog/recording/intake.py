"""Batches as they arrive: read in groups, checked, and turned into rows of the table."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import dims_to_places, split_by_operator
from foretoken.catalog.quality import judge
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.wire.arrow import check_measurement_table, read_table

# A group is full with this many batches or rows.
GROUP_BATCHES = 64
GROUP_ROWS = 61_440


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch as it was sent, its rows in memory."""

    batch: MeasurementBatch
    rows: pa.Table


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedBatch:
    """What the table `batch` says of a batch."""

    batch_index: int
    num_rows: int
    num_flagged: int
    num_failed: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class CheckedGroup:
    """Batches of one run, and their rows one after the other.

    The rows have the columns of the table `measurement` but the first, `batch_number`.
    """

    batches: tuple[CheckedBatch, ...]
    rows: pa.Table

    def select(self, places: Sequence[int]) -> pa.Table:
        """Return the rows of some of the batches, by their places in the group."""
        if len(places) == len(self.batches):
            return self.rows
        starts = np.cumsum([0, *(batch.num_rows for batch in self.batches)])
        return pa.concat_tables(
            [self.rows.slice(int(starts[at]), self.batches[at].num_rows) for at in places]
        )


class GroupReader:
    """Reads a stream group by group, and no further than the group it is asked for.

    Rows of an import become visible all at once, so its batches may be stored together. A batch of
    a profile is a group of its own: the sender measures the next when it has the receipt.
    """

    def __init__(self, run: Run, batches: Iterable[MeasurementBatch]) -> None:
        """Keep the stream."""
        self._batches = iter(batches)
        self._max_batches = GROUP_BATCHES if run.kind is RunKind.IMPORT else 1
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[list[Arrival]]:
        """Yield the groups; an error of the stream comes after what it brought before."""
        while group := self._read():
            yield group
        if self._error is not None:
            raise self._error

    def _read(self) -> list[Arrival]:
        group: list[Arrival] = []
        num_rows = 0
        while self._error is None and len(group) < self._max_batches and num_rows < GROUP_ROWS:
            try:
                batch = next(self._batches, None)
                if batch is None:
                    break
                group.append(Arrival(batch, read_table(batch.rows)))
            except Exception as err:  # noqa: BLE001 - raised when what came before is stored
                self._error = err
                break
            num_rows += group[-1].rows.num_rows
            if batch.wants_receipt or batch.is_last:
                break
        return group


def check_arrivals(
    arrivals: Sequence[Arrival], max_batch_rows: int
) -> tuple[CheckedGroup | None, ForetokenError | None]:
    """Check and judge batches of one run together.

    Returns those before the first that is refused, and the error that refuses it.
    """
    try:
        return _check_group(arrivals, max_batch_rows), None
    except ForetokenError as err:
        if len(arrivals) == 1:
            err.message = f"batch {arrivals[0].batch.batch_index}: {err.message}"
            err.args = (err.message,)
            return None, err
    # Seldom, so at leisure: which one it was, and the others again.
    for place, arrival in enumerate(arrivals):
        _, error = check_arrivals([arrival], max_batch_rows)
        if error is not None:
            before = arrivals[:place]
            return (_check_group(before, max_batch_rows) if before else None), error
    return _check_group(arrivals, max_batch_rows), None


def _check_group(arrivals: Sequence[Arrival], max_batch_rows: int) -> CheckedGroup:
    import pyarrow.compute as pc  # takes long to load

    tables = [_check_batch(arrival, max_batch_rows) for arrival in arrivals]
    sizes = [table.num_rows for table in tables]
    table, groups = split_by_operator(pa.concat_tables(tables).combine_chunks())
    judged = judge(table, groups)
    rows = judged.table.drop_columns(["dims"])
    for name, column in dims_to_places(groups, table.num_rows).items():
        rows = rows.append_column(name, column)
    numbers = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes])
    flagged = _count_per_batch(rows.column("flags").is_valid(), sizes)
    failed = _count_per_batch(pc.equal(rows.column("status"), "failed"), sizes)
    batches = [
        CheckedBatch(
            batch_index=arrival.batch.batch_index,
            num_rows=num_rows,
            num_flagged=num_flagged,
            num_failed=num_failed,
            is_last=arrival.batch.is_last,
        )
        for arrival, num_rows, num_flagged, num_failed in zip(
            arrivals, sizes, flagged, failed, strict=True
        )
    ]
    return CheckedGroup(tuple(batches), rows.append_column("row_index", pa.array(numbers)))


def _check_batch(arrival: Arrival, max_batch_rows: int) -> pa.Table:
    if arrival.batch.batch_index < 0:
        raise InvalidRequestError.of_field("batch_index", "must not be negative")
    if arrival.rows.num_rows > max_batch_rows:
        raise InvalidRequestError.of_field(
            "rows", f"{arrival.rows.num_rows} are more than {max_batch_rows}; split them"
        )
    try:
        arrival.rows.validate(full=True)  # offsets beyond the data would be read, too
    except pa.ArrowInvalid as err:
        raise InvalidRequestError.of_field("rows", f"not sound Arrow data: {err}") from err
    return _with_own_names(check_measurement_table(arrival.rows))


def _with_own_names(rows: pa.Table) -> pa.Table:
    """Return rows whose devices go by their own names, whatever a driver or a tool called them."""
    import pyarrow.compute as pc  # takes long to load

    place = rows.schema.get_field_index("device")
    given = rows.column(place)
    own_names = {name: canonical_device(name) for name in pc.unique(given).to_pylist()}
    renamed = [name for name, own_name in own_names.items() if name != own_name]
    if not renamed:
        return rows
    names = pa.array([own_names[name] for name in given.to_pylist()], given.type)
    return rows.set_column(place, rows.schema.field(place), names)


def _count_per_batch(is_one: pa.ChunkedArray, sizes: Sequence[int]) -> list[int]:
    totals = np.concatenate([[0], np.cumsum(is_one.to_numpy(), dtype=np.int64)])
    counts: list[int] = np.diff(totals[np.cumsum([0, *sizes])]).tolist()
    return counts
