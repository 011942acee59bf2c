"""How fast the embedded catalog stores rows, by the size of its batches.

Prints rows per second from an Arrow table to the receipt: checked, judged, committed.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dims import columns_to_dims
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurement import MeasurementBatch, Run, RunKind
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

# (rows of a batch, batches)
SIZES = ((100_000, 3), (10_000, 20), (1_000, 50))


def make_rows(num_rows: int, seed: int) -> pa.Table:
    """Return plausible GEMMs at random sizes."""
    rng = np.random.default_rng(seed)
    dims = {name: 2 ** rng.integers(4, 13, num_rows) for name in ("m", "n", "k")}
    flops = 2.0 * dims["m"] * dims["n"] * dims["k"]
    texts = {
        "operator": "gemm",
        "phase": "forward",
        "dtype": "fp16",
        "device": "a30",
        "framework": "vllm",
        "status": "ok",
    }
    columns = {name: pa.array([text] * num_rows) for name, text in texts.items()}
    columns["dims"] = columns_to_dims(dims, num_rows)
    columns["latency_us_median"] = pa.array(5 + flops / 100e6 * rng.uniform(1, 1.05, num_rows))
    arrays = [
        columns.get(field.name, pa.nulls(num_rows, field.type)).cast(field.type)
        for field in MEASUREMENT_SCHEMA
    ]
    return pa.table(arrays, schema=MEASUREMENT_SCHEMA)


def measure_rows_per_s(folder: Path, batch_rows: int, num_batches: int) -> float:
    """Return the rate of storing batches, the first of which warms up."""
    service = CatalogService(CatalogConfig(path=str(folder / f"{batch_rows}.duckdb")))
    service.open()
    batches = [
        MeasurementBatch(batch_index=index, rows=make_rows(batch_rows, index))
        for index in range(num_batches + 1)
    ]
    receipts = service.record(Run(run_id="bench", kind=RunKind.PROFILE, tool="bench"), batches)
    next(receipts)
    start_s = time.perf_counter()
    num_rows = sum(receipt.num_rows for receipt in receipts)
    elapsed_s = time.perf_counter() - start_s
    service.close()
    return num_rows / elapsed_s


def main() -> None:
    """Print one line per batch size."""
    sys.stdout.write(f"{'batch rows':>10} {'rows/s':>10}\n")
    with TemporaryDirectory() as folder:
        for batch_rows, num_batches in SIZES:
            rate = measure_rows_per_s(Path(folder), batch_rows, num_batches)
            sys.stdout.write(f"{batch_rows:>10} {rate:>10.0f}\n")


if __name__ == "__main__":
    main()
