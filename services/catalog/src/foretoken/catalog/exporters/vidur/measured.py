"""Catalog rows of one device as columns by operator, in the units of Vidur's files."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from foretoken.catalog.array import Floats, Integers
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.units import US_PER_MS
from foretoken.wire.arrow import dims_to_columns

STATISTICS = ("min", "max", "mean", "median", "std")


@dataclass(frozen=True, slots=True)
class Measured:
    """Rows of one operator in the order of the catalog; times in ms, NaN where not known.

    `order` are the rows' places in what was exported.
    """

    order: Integers
    dims: Mapping[str, Integers]
    times_ms: Mapping[str, Floats]
    kernels: npt.NDArray[np.str_]

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return len(self.kernels)

    def find(self, wanted: Mapping[str, int]) -> Integers:
        """Return the places of rows with these dimensions, whatever the others are."""
        mask = np.ones(self.num_rows, dtype=bool)
        for name, value in wanted.items():
            mask &= self.dims[name] == value
        return np.flatnonzero(mask)


def measure_operator(rows: pa.Table, operator: str) -> Measured:
    """Return the rows of an operator, which may be none; a column `order` numbers them."""
    found = rows.filter(pc.equal(rows["operator"], operator))
    return Measured(
        found["order"].to_numpy(),
        dims_to_columns(found, find_operator(operator).dim_names),
        {name: _to_ms(found[f"latency_us_{name}"]) for name in STATISTICS},
        np.array(pc.fill_null(found["kernel"], "").to_pylist(), dtype=str),
    )


def _to_ms(column: pa.ChunkedArray) -> Floats:
    """Return times in ms, such that those which came from ms become the very same numbers."""
    times_us = pc.fill_null(column, np.nan).to_numpy()
    times_ms = times_us / US_PER_MS
    for towards in (0.0, np.inf):
        near = np.nextafter(times_ms, towards)
        is_better = (times_ms * US_PER_MS != times_us) & (near * US_PER_MS == times_us)
        times_ms = np.where(is_better, near, times_ms)
    return np.asarray(times_ms, dtype=np.float64)
