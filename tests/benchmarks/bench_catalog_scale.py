"""A catalog as it grows: what recording, look-ups, disk and a cloud's month take at each size.

Rows are synthetic: sizes and times at random, so that they compress as measured ones do. At each
doubling the same questions are asked, the least of three; recording counts the processor's time, as
other processes do not change that. The last line extends the disk to `--target` rows. Prices are
lists' of a large cloud, by options.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dims import columns_to_dims
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import (
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
    SqlQuery,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.wire.arrow import MEASUREMENT_SCHEMA, read_table

BATCH_ROWS = 100_000
NUM_REPEATS = 3
DEVICES = ("a100_sxm_80", "h100_sxm", "h200_sxm", "a30", "a40")
OPERATORS = ("gemm", "rms_norm", "rope", "embedding", "moe_experts")
POINT = """
    SELECT median(latency_us_median) FROM op_gemm
    WHERE device = 'a30' AND dtype = 'fp16' AND m = 64 AND n = 4096 AND k = 4096
"""
HOURS_PER_MONTH = 730
GB = 1e9


def make_rows(operator: str, device: str, seed: int) -> pa.Table:
    """Return a batch of rows at random sizes, made as columns."""
    rng = np.random.default_rng(seed)
    sizes = {n: 2 ** rng.integers(4, 14, BATCH_ROWS) for n in find_operator(operator).dim_names}
    # Slower than any limit of a device, so that nothing is flagged.
    latency_us = 1e9 * rng.uniform(1, 2, BATCH_ROWS)
    texts = {
        "operator": operator,
        "phase": "forward",
        "dtype": "fp16",
        "device": device,
        "kernel": f"kernel_{seed % 3}",
        "status": "ok",
    }
    columns = {name: pa.repeat(text, BATCH_ROWS) for name, text in texts.items()}
    columns["dims"] = columns_to_dims(sizes, BATCH_ROWS)
    columns["latency_us_median"] = pa.array(latency_us)
    columns["latency_us_p10"] = pa.array(latency_us * rng.uniform(0.95, 1, BATCH_ROWS))
    columns["latency_us_p90"] = pa.array(latency_us * rng.uniform(1, 1.05, BATCH_ROWS))
    nothing = [pa.nulls(BATCH_ROWS, field.type) for field in MEASUREMENT_SCHEMA]
    arrays = [
        columns.get(field.name, empty).cast(field.type)
        for field, empty in zip(MEASUREMENT_SCHEMA, nothing, strict=True)
    ]
    return pa.table(arrays, schema=MEASUREMENT_SCHEMA)


def batches(start: int, stop: int) -> Iterator[MeasurementBatch]:
    """Yield batches, each of one operator on one device."""
    for number in range(start, stop):
        operator = OPERATORS[number % len(OPERATORS)]
        device = DEVICES[number // len(OPERATORS) % len(DEVICES)]
        yield MeasurementBatch(batch_index=number - start, rows=make_rows(operator, device, number))


def least_ms(ask: Callable[[], object]) -> float:
    """Return the least time of a few in ms."""
    times = []
    for _ in range(NUM_REPEATS):
        begun = time.perf_counter()
        ask()
        times.append(time.perf_counter() - begun)
    return 1e3 * min(times)


def grow(catalog: CatalogService, start: int, stop: int) -> float:
    """Record batches as an import, and return the rows a second of CPU, without making them."""
    made_s = 0.0

    def timed() -> Iterator[MeasurementBatch]:
        nonlocal made_s
        source = batches(start, stop)
        while True:
            begun = time.process_time()
            batch = next(source, None)
            made_s += time.process_time() - begun
            if batch is None:
                return
            yield batch

    begun = time.process_time()
    run = Run(run_id=f"run-{start}", kind=RunKind.IMPORT, tool="bench")
    list(catalog.record(run, timed()))
    return (stop - start) * BATCH_ROWS / (time.process_time() - begun - made_s)


def main() -> None:
    """Grow a catalog by doubling, and print what each size takes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--target", type=int, default=100_000_000)
    # Amazon's lists of 2025, us-east-1: gp3, and m7i.large with 2 vCPU and 8 GiB.
    parser.add_argument("--usd-per-gb-month", type=float, default=0.08)
    parser.add_argument("--usd-per-hour", type=float, default=0.1008)
    given = parser.parse_args()
    selection = MeasurementFilter(operator="gemm", device="a30")
    heads = ("rows", "rows/CPU s", "MB", "B/row", "point, ms", "GEMMs, ms", "coverage, ms")
    print("".join(f"{head:>13}" for head in heads))
    with TemporaryDirectory() as folder:
        catalog = CatalogService(CatalogConfig(path=str(Path(folder, "catalog.duckdb"))))
        catalog.open()
        done, wanted = 0, 10
        num_bytes = 0
        while done * BATCH_ROWS < given.rows:
            rate = grow(catalog, done, wanted)
            done, wanted = wanted, 2 * wanted
            num_rows, num_bytes = done * BATCH_ROWS, catalog.size_bytes()
            point = least_ms(lambda: read_table(catalog.query_sql(SqlQuery(text=POINT))))
            gemms = least_ms(lambda: read_table(catalog.read_measurements(selection)))
            coverage = least_ms(catalog.describe_coverage)
            figures = (
                num_rows,
                rate,
                num_bytes / 1e6,
                num_bytes / num_rows,
                point,
                gemms,
                coverage,
            )
            print("".join(f"{figure:>13,.0f}" for figure in figures), flush=True)
        catalog.close()
    # As much again for a backup, and for what a compaction writes.
    disk_gb = 3 * num_bytes / (done * BATCH_ROWS) * given.target / GB
    month = disk_gb * given.usd_per_gb_month + HOURS_PER_MONTH * given.usd_per_hour
    print(
        f"{given.target:,} rows: {disk_gb / 3:.1f} GB, three times that of disk, and a machine of"
        f" {given.usd_per_hour:g} USD/h: {month:.0f} USD a month"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
