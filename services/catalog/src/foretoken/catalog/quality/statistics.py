"""Find rows whose statistics contradict each other."""

from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.quality.flag import RowFlags

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
