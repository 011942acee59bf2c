"""How long recording and reading wait while a catalog in one file is compacted.

A catalog of `--rows` synthetic rows loses the part `--pruned` of them. A recorder then sends
batches of 1,000 rows, one after another, and a reader lists the runs, before and during a
compaction; the slowest of each is what they waited.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from bench_catalog_scale import BATCH_ROWS, batches, make_rows

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import (
    MeasurementBatch,
    PruneRequest,
    Run,
    RunKind,
)

RECORDED_ROWS = 1000
BEFORE_S = 10.0


class Times:
    """What a call took each time, in s."""

    def __init__(self, name: str) -> None:
        """Begin with none."""
        self.name = name
        self.of_calls_s: list[float] = []

    def describe(self) -> str:
        """Return the median and the slowest in ms."""
        median, slowest = statistics.median(self.of_calls_s), max(self.of_calls_s)
        count = len(self.of_calls_s)
        return (
            f"{self.name}: {count} calls, median {1e3 * median:.0f}, slowest {1e3 * slowest:.0f} ms"
        )


@contextmanager
def repeated(work: Callable[[int], object], times: Times) -> Iterator[None]:
    """Do something again and again in a thread until the end."""
    stopped = threading.Event()

    def repeat() -> None:
        number = 0
        while not stopped.is_set():
            begun = time.perf_counter()
            work(number)
            times.of_calls_s.append(time.perf_counter() - begun)
            number += 1

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def fill(catalog: CatalogService, num_rows: int, pruned_ratio: float, days: list[float]) -> None:
    """Record runs of a million rows, and prune the first of them."""
    step = 1_000_000 // BATCH_ROWS
    num_runs = num_rows // 1_000_000
    for number in range(num_runs):
        days[0] = 0.0 if number < pruned_ratio * num_runs else 100.0
        run = Run(run_id=f"run-{number}", kind=RunKind.IMPORT, tool="bench")
        list(catalog.record(run, batches(number * step, (number + 1) * step)))
    catalog.prune(PruneRequest(older_than_days=50))


def main() -> None:
    """Compact one catalog, and print what recorder and reader waited."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=12_000_000)
    parser.add_argument("--pruned", type=float, default=0.75)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    rows = make_rows("gemm", "a30", 1).slice(0, RECORDED_ROWS)
    days = [0.0]
    with TemporaryDirectory(dir=given.folder) as folder:
        catalog = CatalogService(
            CatalogConfig(path=str(Path(folder, "catalog.duckdb"))),
            lambda: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=days[0]),
        )
        catalog.open()
        fill(catalog, given.rows, given.pruned, days)

        def record(name: str) -> Callable[[int], object]:
            return lambda number: list(
                catalog.record(
                    Run(run_id=f"{name}-{number}", kind=RunKind.PROFILE, tool="bench"),
                    [MeasurementBatch(batch_index=0, rows=rows)],
                )
            )

        def ask(_number: int) -> object:
            return catalog.list_runs()

        for name, wait in (
            ("before", lambda: time.sleep(BEFORE_S)),
            ("compaction", lambda: print(catalog.compact(), flush=True)),
        ):
            recorder, reader = Times(f"{name}, recorder"), Times(f"{name}, reader")
            with repeated(record(name), recorder), repeated(ask, reader):
                wait()
            print(f"{recorder.describe()}\n{reader.describe()}", flush=True)
        catalog.close()


if __name__ == "__main__":
    main()
