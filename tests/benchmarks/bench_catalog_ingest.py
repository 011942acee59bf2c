"""How fast the catalog stores rows: by size of batch, by number of streams, embedded and remote.

Prints rows per second from Arrow tables to receipts: checked, judged, on disk. An import is one
stream, whose batches may be stored together; profiles are eight streams at once, each of which
waits for a batch's receipt before it measures the next. Remote is gRPC on loopback to a process of
its own. The review of a whole run is not part of it: these runs stay open.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import numpy as np
import pyarrow as pa

from foretoken.catalog import servicer
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.dims import columns_to_dims
from foretoken.catalog.service import CatalogService
from foretoken.client.services import CatalogClient
from foretoken.domain.measurements.measurement import BatchReceipt, MeasurementBatch, Run, RunKind
from foretoken.wire.arrow import MEASUREMENT_SCHEMA

sys.path.append(str(Path(__file__).resolve().parents[1] / "contract"))

from loopback import serve

NUM_REPEATS = 3
NUM_STREAMS = 8
PROFILE_ROWS = 1_000
PROFILE_BATCHES = 50
# Rows of a batch: batches, goal in rows/s. Remote may take twice as long.
IMPORTS = {100_000: (10, 400_000), 10_000: (100, None), 1_000: (600, 150_000)}
REMOTE_RATIO = 2

Record = Callable[[Run, Iterable[MeasurementBatch]], Iterator[BatchReceipt]]


@cache
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


def make_batches(batch_rows: int, num_batches: int) -> list[MeasurementBatch]:
    """Return batches of a run that stays open; their rows repeat after some."""
    return [
        MeasurementBatch(batch_index=index, rows=make_rows(batch_rows, index % 16))
        for index in range(num_batches)
    ]


def count_rows(record: Record, kind: RunKind, batches: Iterable[MeasurementBatch]) -> int:
    """Record a new run; return the rows it has receipts for."""
    run = Run(run_id=uuid4().hex, kind=kind, tool="bench")
    return sum(receipt.num_rows for receipt in record(run, batches))


def import_rows_per_s(record: Record, batch_rows: int, num_batches: int) -> float:
    """Return the rate of one stream."""
    batches = make_batches(batch_rows, num_batches)
    start_s = time.perf_counter()
    return count_rows(record, RunKind.IMPORT, batches) / (time.perf_counter() - start_s)


def profile_rows_per_s(records: list[Record]) -> float:
    """Return the rate of several streams together, one per way to record."""
    batches = make_batches(PROFILE_ROWS, PROFILE_BATCHES)
    with ThreadPoolExecutor(len(records)) as pool:
        start_s = time.perf_counter()
        work = [pool.submit(count_rows, record, RunKind.PROFILE, batches) for record in records]
        num_rows = sum(future.result() for future in work)
        return num_rows / (time.perf_counter() - start_s)


def report(name: str, measure: Callable[[], float], goal: float | None) -> None:
    """Print the median of a rate after one to warm up, its range, and its goal."""
    measure()
    rates = [measure() for _ in range(NUM_REPEATS)]
    spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
    wanted = f"{goal:>10,.0f}" if goal else f"{'-':>10}"
    sys.stdout.write(f"{name:<32} {statistics.median(rates):>10,.0f} {wanted}  {spread}\n")
    sys.stdout.flush()


def report_all(where: str, records: list[Record], goal_ratio: float) -> None:
    """Print all rates of one way to reach a catalog."""
    for batch_rows, (num_batches, goal) in IMPORTS.items():
        report(
            f"{where}, import, {batch_rows:,} a batch",
            lambda rows=batch_rows, num=num_batches: import_rows_per_s(records[0], rows, num),
            goal and goal / goal_ratio,
        )
    one, all_streams = records[:1], records
    for streams in (one, all_streams):
        report(
            f"{where}, {len(streams)} profiles, {PROFILE_ROWS:,} a batch",
            lambda streams=streams: profile_rows_per_s(streams),
            IMPORTS[PROFILE_ROWS][1] / goal_ratio if streams is all_streams else None,
        )


@contextmanager
def remote_catalog(path: Path) -> Iterator[str]:
    """Start a catalog in a process of its own; yield its address."""
    command = [sys.executable, __file__, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process.stdout.readline().strip()
        process.communicate("")


def serve_until_told(path: str) -> None:
    """Serve a catalog; print its address, and stop at the end of the input."""
    service = CatalogService(CatalogConfig(path=path))
    service.open()
    with serve(servicer.register, service) as options:
        sys.stdout.write(f"{options.address}\n")
        sys.stdout.flush()
        sys.stdin.read()
    service.close()


def main() -> None:
    """Print one line per way to record."""
    sys.stdout.write(f"{'':<32} {'rows/s':>10} {'goal':>10}  range of {NUM_REPEATS}\n")
    with TemporaryDirectory() as folder:
        service = CatalogService(CatalogConfig(path=str(Path(folder) / "embedded.duckdb")))
        service.open()
        report_all("embedded", [service.record] * NUM_STREAMS, 1)
        service.close()
        with remote_catalog(Path(folder) / "remote.duckdb") as address:
            clients = [CatalogClient.connect(address) for _ in range(NUM_STREAMS)]
            report_all("gRPC", [client.record for client in clients], REMOTE_RATIO)
            for client in clients:
                client.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve_until_told(sys.argv[1])
    else:
        main()
