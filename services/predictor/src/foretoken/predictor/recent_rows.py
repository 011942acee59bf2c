"""Measurements that came after a moment: the questions they answer, and what they took."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.domain.errors import ForetokenError
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable, Phase
from foretoken.domain.measurements.measurement import ArrowStream, RunKind, RunSummary
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.roofline import FloatColumn
from foretoken.wire.arrow import dims_to_columns, open_stream

_CIRCUMSTANCES = (
    "operator",
    "device",
    "topology",
    "dtype",
    "phase",
    "framework",
    "variant",
    "kernel",
    "is_sustained",
)

# Rows that the catalog flags only because they differ from earlier ones: the very sign of drift.
_TOLERATED_FLAGS = ("duplicate_disagrees",)


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """A query of one table, and what its calls took."""

    query: LatencyQuery
    latency_us: FloatColumn

    @property
    def subject(self) -> tuple[str, str]:
        """Operator and device."""
        return self.query.tables[0].operator, self.query.device


def parse_time(text: str) -> datetime:
    """Return a moment given as ISO 8601; one without a zone is in UTC."""
    moment = datetime.fromisoformat(text)
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def may_be_recent(run: RunSummary, since: datetime) -> bool:
    """Tell whether a run can have rows that became visible after a moment.

    A run that is not complete may get more rows; an import's rows are visible once it is. The
    catalog names whole seconds.
    """
    if not run.completed_at:
        return run.run.kind is RunKind.PROFILE
    return parse_time(run.completed_at) >= since.replace(microsecond=0)


def read_recent(
    stream: ArrowStream, run: RunSummary, since: datetime, step: int
) -> tuple[MeasuredTable, ...]:
    """Return every `step`-th usable row of a run among those that became visible after a moment.

    Usable is what a model could be trained on, and what differs from measurements before, of
    operators, formats and phases known here.
    """
    import pyarrow.compute as pc  # takes long to load, and few processes look back

    from foretoken.predictor.training_rows import keep_usable

    moment = pa.scalar(since.replace(tzinfo=None), pa.timestamp("us"))
    found: list[pa.Table] = []
    num_seen = 0
    for batch in open_stream(stream):
        rows = pa.Table.from_batches([batch])
        if run.run.kind is RunKind.PROFILE:
            rows = rows.filter(pc.greater(rows["recorded_at"], moment))
        usable = keep_usable(rows, _TOLERATED_FLAGS)
        found.append(usable.take(np.arange(-num_seen % step, usable.num_rows, step)))
        num_seen += usable.num_rows
    return tuple(_tabulate(pa.concat_tables(found).unify_dictionaries())) if num_seen else ()


def _tabulate(rows: pa.Table) -> Iterator[MeasuredTable]:
    numbered = rows.append_column("place", pa.array(np.arange(rows.num_rows)))
    groups = numbered.group_by(list(_CIRCUMSTANCES), use_threads=False)
    for group in groups.aggregate([("place", "list")]).to_pylist():
        members = rows.take(pa.array(group.pop("place_list")))
        try:
            query = _build_query(group, members)
        except (ForetokenError, KeyError):
            continue
        yield MeasuredTable(query, members["latency_us"].to_numpy())


def _build_query(group: Mapping[str, Any], rows: pa.Table) -> LatencyQuery:
    """Return the query for rows of the same circumstances.

    Raises:
        UnknownOperatorError, InvalidRequestError: the rows are of no operator known here.
        KeyError: nor is their format or phase.

    """
    spec = find_operator(group["operator"])
    table = OperatorTable(
        operator=spec.name,
        dtype=DType[group["dtype"].upper()],
        phase=Phase[group["phase"].upper()],
        columns=dims_to_columns(rows, spec.dim_names),
        variant=group["variant"],
        kernel=group["kernel"],
    )
    return LatencyQuery(
        device=group["device"],
        tables=(table,),
        topology=group["topology"] if spec.is_collective else "",
        framework=group["framework"],
        sustained=group["is_sustained"],
    )
