"""What a filter means: conditions in SQL, the moment it is applied at, and one within another.

Batches and reviews are numbered by one counter, the catalog's clock. What a filter selects at a
moment never changes later.
"""

from dataclasses import dataclass, replace

import duckdb
import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Integers
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.measurement import MeasurementFilter

_NAMES = ("operator", "device", "topology", "run_id", "model")
# More conditions than this on the number of a batch cost more than the rows they leave out.
_RANGES_MAX = 64


@dataclass(frozen=True, slots=True)
class PinnedFilter:
    """A filter and the moment it is applied at; the filter names no snapshot."""

    selection: MeasurementFilter
    as_of: int


def narrow_filter(outer: MeasurementFilter, inner: MeasurementFilter) -> MeasurementFilter:
    """Return the filter that selects what both do.

    Raises:
        InvalidRequestError: nothing can satisfy both; names the field.

    """
    fields: dict[str, str] = {}
    for name in (*_NAMES, "framework"):
        held, wanted = getattr(outer, name), getattr(inner, name)
        fields[name] = wanted or held
        if held and wanted and held != wanted:
            if name != "framework" or not _overlap(held, wanted):
                raise InvalidRequestError.of_field(
                    name, f"the snapshot holds rows of {held} only, not of {wanted}"
                )
            fields[name] = max(held, wanted, key=len)
    return replace(
        outer,
        **fields,
        include_failed=outer.include_failed and inner.include_failed,
        include_flagged=outer.include_flagged and inner.include_flagged,
    )


def find_row_condition(selection: MeasurementFilter) -> tuple[str, list[str]]:
    """Return the condition on the table `measurement` and the values of its placeholders.

    Runs and later flags lie in other tables and are no part of it.
    """
    terms, values = ["true"], []
    for name in _NAMES:
        if name != "run_id" and (value := getattr(selection, name)):
            terms.append(f"{name} = ?")
            values.append(value)
    if selection.framework:
        # "vllm" and "vllm 0.19" both find vllm 0.19.0; "vllm 0.1" does not.
        found = "concat_ws(' ', framework, framework_version)"
        terms.append(f"(starts_with({found} || ' ', ?) OR starts_with({found}, ?))")
        values += [f"{selection.framework} ", f"{selection.framework}."]
    if not selection.include_failed:
        terms.append("status = 'ok'")
    if not selection.include_flagged:
        terms.append("coalesce(len(flags), 0) = 0")
    return " AND ".join(terms), values


@dataclass(frozen=True, slots=True)
class VisibleBatches:
    """The batches a pinned filter may see rows of, by number, ascending."""

    table: pa.Table
    numbers: Integers

    def without(self, numbers: Integers) -> "VisibleBatches":
        """Return the batches that do not have one of these numbers."""
        is_left = ~np.isin(self.numbers, numbers)
        return VisibleBatches(self.table.filter(pa.array(is_left)), self.numbers[is_left])

    def between(self, first: int, last: int) -> "VisibleBatches":
        """Return the batches that have a number from the first to the last."""
        start = int(np.searchsorted(self.numbers, first))
        stop = int(np.searchsorted(self.numbers, last, side="right"))
        return VisibleBatches(self.table.slice(start, stop - start), self.numbers[start:stop])

    def find_condition(self) -> str:
        """Return a condition that all rows of these batches meet and few others."""
        if not len(self.numbers):
            return "false"
        gaps = np.diff(self.numbers)
        widest = np.sort(np.argsort(gaps, kind="stable")[1 - _RANGES_MAX :])
        splits = widest[gaps[widest] > 1]
        firsts = self.numbers[np.concatenate([[0], splits + 1])]
        lasts = self.numbers[np.concatenate([splits, [-1]])]
        ranges = " OR ".join(
            f"batch_number BETWEEN {first} AND {last}"
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
        )
        return f"batch_number BETWEEN {firsts[0]} AND {lasts[-1]} AND ({ranges})"


def find_visible_batches(cursor: duckdb.DuckDBPyConnection, pinned: PinnedFilter) -> VisibleBatches:
    """Return the batches stored by then, of an import only if it was complete by then."""
    query = """
        SELECT batch.batch_number, batch.run_id, batch.batch_index, batch.recorded_at,
            batch.num_rows
        FROM batch JOIN run_state USING (run_id)
        WHERE batch.batch_number <= $as_of AND ($run_id = '' OR batch.run_id = $run_id)
            AND (run_state.kind = 'profile' OR run_state.completed_by <= $as_of)
        ORDER BY batch.batch_number
    """
    parameters = {"as_of": pinned.as_of, "run_id": pinned.selection.run_id}
    table = cursor.sql(query, params=parameters).to_arrow_table().combine_chunks()
    return VisibleBatches(table, table.column("batch_number").to_numpy())


def _overlap(held: str, wanted: str) -> bool:
    shorter, longer = sorted((held, wanted), key=len)
    return longer.startswith((f"{shorter} ", f"{shorter}."))
