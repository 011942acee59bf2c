"""How long readers of a large catalog wait, and how much memory answering takes.

Prints the median and the least of five for each question, and the peak memory of the process after
it, which only grows. A share of the rows is flagged, at once or later, as in real catalogs.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dims import columns_to_dims
from foretoken.catalog.exporting import ExportRequest, find_exporter
from foretoken.catalog.importing import ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.store import next_moment
from foretoken.domain.measurements.measurement import (
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
    SqlQuery,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.wire.arrow import MEASUREMENT_SCHEMA, read_table

NUM_REPEATS = 5
BATCH_ROWS = 100_000
DEVICES = ("a100_sxm_80", "h100_sxm", "h200_sxm", "a30", "a40")
OPERATORS = ("gemm", "rms_norm", "rope", "embedding", "moe_experts")
EVERYTHING = MeasurementFilter(include_failed=True, include_flagged=True)
POINT = """
    SELECT median(latency_us_median) FROM op_gemm
    WHERE device = 'a30' AND dtype = 'fp16' AND m = 64 AND n = 4096 AND k = 4096
"""


def make_rows(operator: str, device: str, seed: int) -> pa.Table:
    """Return a batch of rows at random sizes; one in a hundred is flagged, one in 200 failed."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(BATCH_ROWS)
    dims = {
        name: 2 ** rng.integers(4, 14, BATCH_ROWS) for name in find_operator(operator).dim_names
    }
    # Slower than any limit of a device, so that nothing but what is planned here is flagged.
    latency_us = 1e9 * rng.uniform(1, 2, BATCH_ROWS)
    is_failed = numbers % 200 == 0
    texts = {
        "operator": operator,
        "phase": "forward",
        "dtype": "fp16",
        "device": device,
        "framework": "vllm",
        "framework_version": f"0.{seed % 7}",
        "kernel": f"kernel_{seed % 3}",
        "source_file": f"compute/{device}/{operator}.csv",
        "source_hash": f"{seed:064x}",
    }
    columns: dict[str, Any] = {name: pa.repeat(text, BATCH_ROWS) for name, text in texts.items()}
    columns["dims"] = columns_to_dims(dims, BATCH_ROWS)
    columns["source_row"] = pa.array(numbers + 1)
    columns["latency_us_median"] = pa.array(latency_us, mask=is_failed)
    columns["latency_us_min"] = pa.array(0.9 * latency_us, mask=is_failed)
    columns["status"] = pa.array(np.where(is_failed, "failed", "ok").tolist())
    columns["status_reason"] = pa.array([("no memory" if f else None) for f in is_failed])
    columns["flags"] = [["bench: flagged"] if n % 100 == 1 else None for n in numbers.tolist()]
    arrays = [
        pa.array(columns[field.name], field.type)
        if isinstance(columns.get(field.name), list)
        else columns.get(field.name, pa.nulls(BATCH_ROWS, field.type)).cast(field.type)
        for field in MEASUREMENT_SCHEMA
    ]
    return pa.table(arrays, schema=MEASUREMENT_SCHEMA)


def fill(catalog: CatalogService, num_rows: int) -> None:
    """Record a profile per device, and flag one row in a thousand."""
    num_batches = max(1, num_rows // BATCH_ROWS)
    for place, device in enumerate(DEVICES):
        seeds = range(place, num_batches, len(DEVICES))
        batches = (
            MeasurementBatch(
                batch_index=index,
                rows=make_rows(OPERATORS[index % len(OPERATORS)], device, seed),
            )
            for index, seed in enumerate(seeds)
        )
        list(catalog.record(Run(run_id=device, kind=RunKind.PROFILE, tool="bench"), batches))
    with catalog._store.transaction() as cursor:
        moment = next_moment(cursor)
        cursor.execute(
            "INSERT INTO review VALUES (?, '', '', '', 0, ?)", [moment, datetime.now(tz=UTC)]
        )
        cursor.execute(
            "INSERT INTO doubt SELECT batch_number, row_index, 'bench: doubted later', ?, NULL"
            " FROM measurement WHERE row_index % 1000 = 7",
            [moment],
        )


def count_rows(stream: Any) -> int:
    """Read a stream to its end without keeping it."""
    return sum(batch.num_rows for batch in pa.RecordBatchReader.from_stream(stream))


def create_anew(catalog: CatalogService, selection: MeasurementFilter) -> str:
    """Create a snapshot that is not there; return its name."""
    for snapshot in catalog.list_snapshots():
        catalog.delete_snapshot(snapshot.content_hash)
    return catalog.create_snapshot(selection).content_hash


def list_questions(catalog: CatalogService) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what is asked and how; those of snapshots come last and build on each other."""
    gemms = MeasurementFilter(operator="gemm", device="a30")
    yield "one point in SQL", lambda: read_table(catalog.query_sql(SqlQuery(text=POINT)))
    yield "all GEMMs of a device", lambda: count_rows(catalog.read_measurements(gemms))
    yield "coverage", catalog.describe_coverage
    yield "list_devices", catalog.list_devices
    yield "list_runs", catalog.list_runs
    yield (
        "first batch of a full read",
        lambda: next(iter(pa.RecordBatchReader.from_stream(catalog.read_measurements(EVERYTHING)))),
    )
    yield "full read", lambda: count_rows(catalog.read_measurements(EVERYTHING))
    yield "snapshot of everything", lambda: create_anew(catalog, EVERYTHING)
    everything = catalog.create_snapshot(EVERYTHING).content_hash
    trusted = catalog.create_snapshot(MeasurementFilter()).content_hash
    within = MeasurementFilter(snapshot=trusted)
    yield "snapshot that is there", lambda: catalog.create_snapshot(EVERYTHING)
    yield "read a snapshot", lambda: count_rows(catalog.read_measurements(within))
    yield "diff, other filters", lambda: catalog.diff_snapshots(everything, trusted)
    rows = make_rows("gemm", "a30", 10**6)
    more = MeasurementBatch(batch_index=0, rows=rows)
    list(catalog.record(Run(run_id="more", kind=RunKind.PROFILE, tool="bench"), [more]))
    later = catalog.create_snapshot(EVERYTHING).content_hash
    yield "diff, one batch more", lambda: catalog.diff_snapshots(everything, later)


def measure(ask: Callable[[], Any]) -> tuple[float, float]:
    """Return the median and the least time of some repeats, in seconds."""
    times_s = []
    for _ in range(NUM_REPEATS):
        start_s = time.perf_counter()
        ask()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s), min(times_s)


def report(name: str, median_s: float, least_s: float) -> None:
    """Print one line."""
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    sys.stdout.write(f"{name:<28} {1e3 * median_s:>10.1f} {1e3 * least_s:>10.1f} {peak_mib:>10}\n")
    sys.stdout.flush()


def time_dataset(catalog: CatalogService, folder: Path) -> None:
    """Print how long a dataset takes to be written and to be read back, once each."""
    start_s = time.perf_counter()
    rows = catalog.read_measurements(EVERYTHING)
    find_exporter("parquet").write(rows, ExportRequest(path=folder))
    report("export to Parquet", *2 * [time.perf_counter() - start_s])
    start_s = time.perf_counter()
    find_importer("parquet").read(ImportRequest(path=folder))
    report("check a Parquet dataset", *2 * [time.perf_counter() - start_s])


def main() -> None:
    """Fill a catalog, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    num_rows = parser.parse_args().rows
    with TemporaryDirectory() as folder:
        path = Path(folder) / "catalog.duckdb"
        catalog = CatalogService(CatalogConfig(path=str(path)))
        catalog.open()
        start_s = time.perf_counter()
        fill(catalog, num_rows)
        sys.stdout.write(
            f"{num_rows} rows recorded in {time.perf_counter() - start_s:.0f} s, "
            f"{path.stat().st_size / 2**20:.0f} MiB\n"
            f"{'':<28} {'median ms':>10} {'least ms':>10} {'peak MiB':>10}\n"
        )
        for name, ask in list_questions(catalog):
            report(name, *measure(ask))
        time_dataset(catalog, Path(folder) / "dataset")
        catalog.close()


if __name__ == "__main__":
    main()
