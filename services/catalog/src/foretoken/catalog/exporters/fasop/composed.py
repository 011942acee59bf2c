"""Tables composed of rows that measure operators alone."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from foretoken.catalog.exporters.fasop.layer_plan import LayerPlan, Part, Point
from foretoken.catalog.exporters.fasop.table import ProfileTable, TableKey
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.units import US_PER_MS
from foretoken.wire.arrow import dims_to_columns

_REMARK = (
    "is composed of operators measured alone: it has no host gaps, mlp_act_fn holds the product "
    "with up and mlp_down does not, projections measured as one count by their widths"
)


class MeasuredPoints:
    """The times of the points that a plan needs, by device."""

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self.num_rows = 0
        self._wanted = plan.wanted_points()
        self._times_us: dict[str, dict[Point, list[float]]] = {}

    def take(self, rows: pa.RecordBatch) -> Mapping[str, int]:
        """Gather the rows that measure a wanted point in the plain way, unflagged.

        Return how many of each operator those are.
        """
        taken: dict[str, int] = {}
        for operator, points in self._wanted.items():
            spec = find_operator(operator)
            is_plain = _all(
                pc.equal(rows["operator"], operator),
                pc.equal(rows["phase"], "forward"),
                pc.equal(rows["status"], "ok"),
                pc.is_null(rows["variant"]),
                pc.fill_null(pc.equal(pc.list_value_length(rows["flags"]), 0), fill_value=True),
            )
            if not spec.is_collective:
                is_format = pc.equal(rows["dtype"], self.plan.dtype.name.lower())
                is_plain = pc.and_(is_plain, is_format)
            table = pa.Table.from_batches([rows.filter(is_plain)])
            if table.num_rows:
                columns = dims_to_columns(table, spec.dim_names)
                dims = zip(*(column.tolist() for column in columns.values()), strict=True)
                taken[operator] = self._keep(operator, points, table, list(dims))
        self.num_rows += sum(taken.values())
        return taken

    def _keep(
        self,
        operator: str,
        points: set[tuple[int, ...]],
        table: pa.Table,
        dims: list[tuple[int, ...]],
    ) -> int:
        num_kept = 0
        times_us = pc.coalesce(table["latency_us_mean"], table["latency_us_median"]).to_pylist()
        devices = table["device"].to_pylist()
        for device, time_us, point in zip(devices, times_us, dims, strict=True):
            if point in points:
                num_kept += 1
                found = self._times_us.setdefault(device, {})
                found.setdefault((operator, point), []).append(time_us)
        return num_kept

    def fill(self, tables: dict[TableKey, ProfileTable]) -> tuple[str, ...]:
        """Put what can be composed into tables that no profile has filled; return remarks."""
        composed: dict[TableKey, ProfileTable] = {}
        for device, times_us in self._times_us.items():
            for shape, micro_batch in self.plan.shapes():
                key = TableKey(self.plan.model.name, device, shape.tp)
                if key not in tables:
                    table = composed.setdefault(key, ProfileTable())
                    columns = self.plan.parts_by_column(shape, micro_batch)
                    _fill_row(table, micro_batch, columns, times_us)
        tables.update(composed)
        return tuple(
            f"{key.file_name} {_REMARK}" for key, table in composed.items() if len(table.to_array())
        )


def _fill_row(
    table: ProfileTable,
    micro_batch: int,
    columns: Mapping[str, Sequence[Part]],
    times_us: Mapping[Point, Sequence[float]],
) -> None:
    for column, parts in columns.items():
        time_us = _sum_of(parts, times_us)
        if time_us is not None:
            table.add(micro_batch, column, time_us / US_PER_MS)


def _sum_of(parts: Sequence[Part], times_us: Mapping[Point, Sequence[float]]) -> float | None:
    """Return the time of all parts, None where one was not measured."""
    total = 0.0
    for part in parts:
        measured = [calls for calls in part if all(call.point in times_us for call in calls)]
        if not measured:
            return None
        total += sum(median(times_us[call.point]) * call.share for call in measured[0])
    return total


def _all(*conditions: Any) -> Any:
    combined = conditions[0]
    for condition in conditions[1:]:
        combined = pc.and_(combined, condition)
    return combined
