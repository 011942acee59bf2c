"""Rows of the catalog grouped for export, and what a writer makes of a group."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.dims import Floats, Integers, Mask, group_rows, split_by_operator
from foretoken.catalog.sources.row import FACT_NAMES
from foretoken.domain.operators.spec.variant import parse_variant

_TEXTS = ("status", *(name for name in FACT_NAMES if name != "operator"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows of one operator in the order they came; `texts` are empty where the row says nothing.

    `facts` are those of the variant, `dims` the dimensions as columns, `order` the rows' places in
    what was exported.
    """

    operator: str
    texts: Mapping[str, str]
    facts: Mapping[str, str]
    dims: Mapping[str, Integers]
    latency_us: Floats
    power_w: Floats
    order: Integers

    @property
    def num_rows(self) -> int:
        """Rows in the group."""
        return len(self.order)

    def take(self, is_taken: Mask) -> "Group":
        """Return the rows for which a value per row is true."""
        return Group(
            operator=self.operator,
            texts=self.texts,
            facts=self.facts,
            dims={name: column[is_taken] for name, column in self.dims.items()},
            latency_us=self.latency_us[is_taken],
            power_w=self.power_w[is_taken],
            order=self.order[is_taken],
        )


def read_groups(rows: pa.RecordBatchReader) -> Iterator[Group]:
    """Yield the rows of a stream in the stored schema, batch by batch."""
    start = 0
    for batch in rows:
        table, operators = split_by_operator(pa.Table.from_batches([batch]))
        texts = {name: _coded(table.column(name)) for name in _TEXTS}
        latency_us, power_w = (
            _floats(table.column(name)) for name in ("latency_us_median", "power_w")
        )
        for found in operators:
            codes = [texts[name][0][found.indices] for name in _TEXTS]
            order, starts = group_rows(codes)
            for first, last in zip(starts, [*starts[1:], len(order)], strict=True):
                places = np.sort(order[first:last])
                indices = found.indices[places]
                said = {name: texts[name][1][texts[name][0][indices[0]]] for name in _TEXTS}
                yield Group(
                    operator=found.spec.name,
                    texts=said,
                    facts=parse_variant(said["variant"]),
                    dims={name: column[places] for name, column in found.columns.items()},
                    latency_us=latency_us[indices],
                    power_w=power_w[indices],
                    order=indices + start,
                )
        start += table.num_rows


def _coded(column: pa.ChunkedArray) -> tuple[Integers, list[str]]:
    encoded = column.combine_chunks()
    encoded = pa.concat_arrays(encoded.chunks) if isinstance(encoded, pa.ChunkedArray) else encoded
    encoded = encoded.dictionary_encode()
    words = encoded.dictionary.to_pylist()
    codes = encoded.indices.fill_null(len(words)).to_numpy(zero_copy_only=False)
    return codes.astype(np.int64), [*words, ""]


def _floats(column: pa.ChunkedArray) -> Any:
    return column.to_numpy().astype(np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Columns of a table, one value per row of `group` or one for all, in the table's order."""

    table: str
    op_name: str
    group: Group
    columns: Mapping[str, Any]
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes groups of one operator whose variants say nothing but these facts.

    It returns None for a group that its table has no words for, and otherwise the rows it has room
    for.
    """

    facts: frozenset[str]
    write: Callable[[Group], Written | None]
