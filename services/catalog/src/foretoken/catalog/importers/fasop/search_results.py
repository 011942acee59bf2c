"""The CSV files next to the profiles: they hold no times of operators, which is said of them."""

from collections import Counter
from pathlib import Path

from foretoken.catalog.sources.file import SourceFile
from foretoken.catalog.sources.table import SourceTable, parse_csv

_PLAN_COLUMNS = ("mbs", "tp", "dp", "pp", "step_time(s)", "is_oom")
_SWEEP_COLUMNS = ("micro_batch_size", "tp", "pp", "dp", "status", "elapsed_sec")


def describe_results(source: SourceFile, path: Path) -> str:
    """Return what a CSV file of FASOP holds.

    Raises:
        InvalidRequestError: it is no CSV file, or a time in it is not a number.

    """
    table = parse_csv(source, path)
    if all(table.has(column) for column in _PLAN_COLUMNS):
        return (
            f"no rows: {table.num_rows} plans of FASOP's search with the step times it "
            f"estimates, {_range(table, 'step_time(s)')}; nothing in it was measured"
        )
    if all(table.has(column) for column in _SWEEP_COLUMNS):
        statuses = Counter(table.texts("status").tolist())
        counts = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
        return (
            f"no rows: a list of {table.num_rows} profiling runs ({counts}) and how long each "
            f"took in all, {_range(table, 'elapsed_sec')}, start and warm-up included"
        )
    return "not a file of this format"


def _range(table: SourceTable, column: str) -> str:
    times_s = table.numbers(column)
    return f"{times_s.min():.4g} to {times_s.max():.4g} s"
