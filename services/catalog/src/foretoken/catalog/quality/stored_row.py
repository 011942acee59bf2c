"""Stored rows of one operator on one device: read, and as the tests of a review see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foretoken.catalog.dims import DIM_COLUMNS, Columns, Floats, Indices, Mask
from foretoken.catalog.quality.bound import Subject, bounds_of
from foretoken.catalog.quality.flag import Coded, narrow_codes, split_by_code
from foretoken.catalog.quality.ingest import IMPOSSIBLE
from foretoken.domain.measurements.measurement import CheckRequest
from foretoken.domain.operators.spec.operator import OperatorSpec, find_operator

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

# Rows are comparable in every detail when these agree; operator and device do already.
ALIKE = ("topology", "dtype", "phase", "framework", "framework_version", "kernel", "variant")
# Rows that one tool wrote into one file.
TABLE = (*ALIKE, "run_id", "source_file")
# Differences below this are the resolution of the timers in use (Vidur's tables have 0.5-1 us).
RESOLUTION_US = 2.0
# What findings are distinguished by.
SUBJECT = ("operator", "device", "topology", "phase", "framework", "kernel")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRows:
    """Successful rows of one operator on one device, from all runs.

    They came without flags, or with that of a time no device can reach (`is_impossible`).
    `work_us` is the roofline, `floor_us` the launch or link latency. `peer_ratios` is, by device,
    how much longer the backward pass of this operator takes than the forward pass where both were
    measured.
    """

    spec: OperatorSpec
    device: str
    columns: Columns
    coded: Mapping[str, Coded]
    latency_us: Floats
    work_us: Floats
    floor_us: Floats
    is_impossible: Mask
    peer_ratios: Mapping[str, float]

    @property
    def expected_us(self) -> Floats:
        """What latencies are compared by."""
        return self.floor_us + self.work_us

    @property
    def level(self) -> Floats:
        """Logarithm of latency over the roofline and the floor: time with most of the trend out."""
        level: Floats = np.log(self.latency_us / self.expected_us)
        return level

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.latency_us)

    def take(self, rows: Indices | slice) -> StoredRows:
        """Return some of the rows; a slice copies nothing."""
        return StoredRows(
            spec=self.spec,
            device=self.device,
            columns={name: column[rows] for name, column in self.columns.items()},
            coded={
                name: Coded(column.codes[rows], column.values)
                for name, column in self.coded.items()
            },
            latency_us=self.latency_us[rows],
            work_us=self.work_us[rows],
            floor_us=self.floor_us[rows],
            is_impossible=self.is_impossible[rows],
            peer_ratios=self.peer_ratios,
        )

    def split(self, names: Sequence[str]) -> Iterator[tuple[Indices, StoredRows]]:
        """Yield the rows that agree in some text columns, with their places."""
        columns = [self.coded[name] for name in names]
        for places, _ in split_by_code(columns, np.arange(len(self))):
            first, last = int(places[0]), int(places[-1])
            is_whole = last - first + 1 == len(places)
            yield places, self.take(slice(first, last + 1) if is_whole else places)

    def value(self, name: str) -> str:
        """Return what the first row says in a text column."""
        column = self.coded[name]
        return column.values[column.codes[0]] or ""


def bound_rows(
    spec: OperatorSpec, device: str, columns: Columns, coded: Mapping[str, Coded]
) -> tuple[Floats, Floats]:
    """Return every row's roofline and floor, both in µs.

    A phase whose work is not known counts like the forward pass.
    """
    num_rows = len(next(iter(columns.values())))
    work_us, floor_us = np.empty(num_rows), np.empty(num_rows)
    names = ("topology", "dtype", "phase", "variant")
    for places, values in split_by_code([coded[name] for name in names], np.arange(num_rows)):
        topology, dtype, phase, variant = values
        known = phase if phase == "backward" and spec.backward_work_ratio else "forward"
        subject = Subject(device, topology, dtype or "", known, variant)
        bounds = bounds_of(spec, {n: c[places] for n, c in columns.items()}, subject)
        work_us[places], floor_us[places] = bounds.work_us, bounds.floor_us
    return work_us, floor_us


# Rows that readers may see, with the flags they came with.
READABLE = """
    SELECT measurement.*, batch.run_id
    FROM measurement
    JOIN (
        SELECT batch.batch_number, batch.run_id
        FROM batch
        JOIN run_state USING (run_id)
        WHERE run_state.kind = 'profile' OR run_state.completed_at IS NOT NULL
    ) AS batch USING (batch_number)
"""
# A check of everything does not count: it may have read the rows before the run was complete.
_UNREVIEWED = """
    SELECT run_id FROM run_state
    WHERE completed_by IS NOT NULL AND tool NOT IN (SELECT unnest(?::VARCHAR[]))
        AND run_id NOT IN (
            SELECT review.run_id FROM review JOIN run_state USING (run_id)
            WHERE review.operator = '' AND review.device = '' AND review_number > completed_by
        )
    ORDER BY completed_by
"""
_IS_IMPOSSIBLE = (
    f"coalesce(len(list_filter(flags, lambda f: starts_with(f, '{IMPOSSIBLE}:'))), 0) > 0"
)


# Text is coded a piece at a time: as such it takes several times the memory of all the rest.
_PIECE_ROWS = 61_440


@dataclass(frozen=True, slots=True)
class ReviewGroup:
    """What is judged together: the rows of one operator on one device."""

    operator: str
    device: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class LoadedRows:
    """Rows to judge, and where each is stored."""

    rows: StoredRows
    batch_numbers: Indices
    row_indices: Indices

    def is_of_run(self, run_id: str) -> Mask:
        """Return which rows are of a run; all when it is empty."""
        if not run_id:
            return np.ones(len(self.rows), dtype=bool)
        return self.rows.coded["run_id"].is_value(run_id)


def find_groups(
    cursor: duckdb.DuckDBPyConnection, request: CheckRequest
) -> tuple[ReviewGroup, ...]:
    """Return the groups that the selected rows belong to."""
    terms, values = ["true"], []
    for name in ("operator", "device", "run_id"):
        if value := getattr(request, name):
            terms.append(f"{name} = ?")
            values.append(value)
    return _fetch_groups(cursor, " AND ".join(terms), values)


def find_groups_of_runs(
    cursor: duckdb.DuckDBPyConnection, run_ids: Sequence[str]
) -> tuple[ReviewGroup, ...]:
    """Return the groups that rows of these runs belong to."""
    return _fetch_groups(cursor, "run_id IN (SELECT unnest(?::VARCHAR[]))", [list(run_ids)])


def find_unreviewed_runs(
    cursor: duckdb.DuckDBPyConnection, trusted_tools: Sequence[str]
) -> tuple[str, ...]:
    """Return the complete runs, but of these tools, that were not reviewed since they are."""
    rows = cursor.execute(_UNREVIEWED, [list(trusted_tools)]).fetchall()
    return tuple(run_id for (run_id,) in rows)


def _fetch_groups(
    cursor: duckdb.DuckDBPyConnection, condition: str, values: Sequence[object]
) -> tuple[ReviewGroup, ...]:
    query = f"""
        WITH readable AS ({READABLE})
        SELECT operator, device, count(*) FROM readable WHERE {condition}
        GROUP BY ALL ORDER BY ALL
    """  # noqa: S608 - values are bound
    return tuple(ReviewGroup(*row) for row in cursor.execute(query, values).fetchall())


def groups_with_backward(
    cursor: duckdb.DuckDBPyConnection, operator: str
) -> tuple[ReviewGroup, ...]:
    """Return the groups of the devices on which an operator's backward pass was measured."""
    devices = "SELECT device FROM readable WHERE operator = ? AND phase = 'backward'"
    condition = f"operator = ? AND device IN ({devices})"
    return _fetch_groups(cursor, condition, [operator, operator])


def load_rows(
    cursor: duckdb.DuckDBPyConnection, group: ReviewGroup, peer_ratios: Mapping[str, float]
) -> LoadedRows:
    """Read the successful rows of a group; of those that came flagged, the impossible ones."""
    spec = find_operator(group.operator)
    places = DIM_COLUMNS[: len(spec.dims)]
    columns = (*places, *TABLE, "latency_us_median", "batch_number", "row_index")
    query = f"""
        WITH readable AS ({READABLE})
        SELECT {", ".join(columns)}, {_IS_IMPOSSIBLE} AS is_impossible
        FROM readable
        WHERE operator = ? AND device = ? AND status = 'ok'
            AND (coalesce(len(flags), 0) = 0 OR {_IS_IMPOSSIBLE})
    """  # noqa: S608 - values are bound
    reader = cursor.sql(query, params=[group.operator, group.device]).to_arrow_reader(_PIECE_ROWS)
    read = _Read(reader.schema, group.num_rows)
    for piece in reader:
        read.add(piece)
    unordered = {name: read.code(name) for name in TABLE}
    # Tables one after the other, so that most splits copy nothing.
    order = np.lexsort([unordered[name].codes for name in reversed(TABLE)])
    coded = {name: Coded(column.codes[order], column.values) for name, column in unordered.items()}
    del unordered
    dims = {
        name: read.take(place, order) for name, place in zip(spec.dim_names, places, strict=True)
    }
    work_us, floor_us = bound_rows(spec, group.device, dims, coded)
    rows = StoredRows(
        spec=spec,
        device=group.device,
        columns=dims,
        coded=coded,
        latency_us=read.take("latency_us_median", order),
        work_us=work_us,
        floor_us=floor_us,
        is_impossible=read.take("is_impossible", order),
        peer_ratios=peer_ratios,
    )
    return LoadedRows(rows, read.take("batch_number", order), read.take("row_index", order))


class _Read:
    """Rows as DuckDB hands them out, in columns that are made once; text as codes.

    What it hands out is copied: a single column of that keeps all of them in memory. Pieces that
    are joined later take the room twice.
    """

    def __init__(self, schema: pa.Schema, num_rows: int) -> None:
        """Make room for about so many rows."""
        self._columns: dict[str, npt.NDArray[Any]] = {
            field.name: np.empty(
                num_rows, np.int32 if field.name in TABLE else field.type.to_pandas_dtype()
            )
            for field in schema
        }
        self._codes: dict[str, dict[str | None, int]] = {name: {} for name in TABLE}
        self._num_rows = 0

    def add(self, piece: pa.RecordBatch) -> None:
        """Copy more rows."""
        start, self._num_rows = self._num_rows, self._num_rows + piece.num_rows
        for name, column in self._columns.items():
            if self._num_rows > len(column):
                column.resize(self._num_rows, refcheck=False)
            values = piece.column(name)
            if name in TABLE:
                known, coded = self._codes[name], values.dictionary_encode("encode")
                codes = [known.setdefault(v, len(known)) for v in coded.dictionary.to_pylist()]
                column[start : self._num_rows] = np.array(codes)[coded.indices.to_numpy()]
            else:
                column[start : self._num_rows] = values.to_numpy(zero_copy_only=False)

    def code(self, name: str) -> Coded:
        """Give up a column of text."""
        values = tuple(self._codes[name])
        return Coded(narrow_codes(self._columns.pop(name)[: self._num_rows], len(values)), values)

    def take(self, name: str, order: Indices) -> npt.NDArray[Any]:
        """Give up a column of numbers, its rows in this order."""
        return np.asarray(self._columns.pop(name)[order])
