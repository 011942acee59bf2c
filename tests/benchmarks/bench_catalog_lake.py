"""What scaling out costs: one file, a lake in a folder, a lake in a bucket, Parquet without a lake.

Needs PostgreSQL and the extra `lake`, so run it with `.venv-lake` (`make setup-lake`).
The bucket is moto's, a Python program on this machine, so its times are those of the bench. Plain
Parquet is an object per commit and a manifest object that names it, written only if absent.
"""

import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench_catalog_ingest import count_rows, import_rows_per_s, make_batches
from lake_servers import find_missing, serve_postgres, serve_s3

from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.catalog.recording.intake import Arrival, check_arrivals
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.lake import LakeAttachment, load_extension
from foretoken.domain.measurements.measurement import RunKind

# Rows of a batch: batches.
SIZES = {1_000: 128, 10_000: 30, 100_000: 8}
NUM_READS = 5
NUM_PROCESSES = 2
READ_ROWS = 1_000_000
QUERIES = {
    "count by device": "SELECT device, dtype, count(*) FROM {rows} GROUP BY ALL",
    "sum of a filter": "SELECT sum(latency_us_median) FROM {rows} WHERE operator = 'gemm'",
    "one point": "SELECT latency_us_median FROM {rows} WHERE d0 = 64 AND d1 = 512 AND d2 = 512",
}
WRITER = """
import sys
from bench_catalog_ingest import import_rows_per_s
from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.catalog.service import CatalogService
folder, postgres = sys.argv[1:]
lake = LakeConfig(data_path=folder, postgres=postgres, schema_name="folder")
catalog = CatalogService(CatalogConfig(path="unused", num_threads=1, lake=lake))
catalog.open()
print("open", flush=True)
sys.stdin.readline()
import_rows_per_s(catalog.record, 10_000, 30)
print("done", flush=True)
"""


@contextlib.contextmanager
def opened(folder: Path, lake: LakeConfig | None = None) -> Iterator[CatalogService]:
    """Open a catalog with one thread."""
    catalog = CatalogService(
        CatalogConfig(path=str(folder / "catalog.duckdb"), num_threads=1, lake=lake)
    )
    catalog.open()
    try:
        yield catalog
    finally:
        catalog.close()


def print_ingest(name: str, catalog: CatalogService) -> None:
    """Print rows/s by size of batch, and how long the receipt of one small batch takes."""
    rates = [
        f"{max(import_rows_per_s(catalog.record, size, count) for _ in range(2)):>9,.0f}"
        for size, count in SIZES.items()
    ]
    waits_ms = []
    for _ in range(10):
        start_s = time.perf_counter()
        count_rows(catalog.record, RunKind.PROFILE, make_batches(1_000, 1))
        waits_ms.append((time.perf_counter() - start_s) * 1e3)
    print(f"{name:<16} {' '.join(rates)} rows/s   receipt {statistics.median(waits_ms):5.0f} ms")


def print_reads(name: str, rows: str, execute: Callable[[str], object]) -> None:
    """Print the milliseconds of each question, the first time and the best of the next."""
    times = []
    for query in QUERIES.values():
        took_ms = []
        for _ in range(NUM_READS):
            start_s = time.perf_counter()
            execute(query.format(rows=rows))
            took_ms.append((time.perf_counter() - start_s) * 1e3)
        times.append(f"{took_ms[0]:6.0f} /{min(took_ms[1:]):4.0f}")
    print(f"{name:<28} {'   '.join(times)} ms")


def fill(catalog: CatalogService) -> None:
    """Record rows until there are enough to read."""
    with catalog._store.cursor() as cursor:
        (num_rows,) = cursor.execute("SELECT count(*) FROM measurement").fetchone() or (0,)
    count_rows(
        catalog.record, RunKind.IMPORT, make_batches(10_000, (READ_ROWS - num_rows) // 10_000)
    )


def print_reads_of(name: str, catalog: CatalogService) -> None:
    """Print what reading takes, for a lake also after compaction."""
    fill(catalog)
    attachment = catalog._store._attachment
    with catalog._store.cursor() as cursor:
        ask = lambda query: cursor.execute(query).fetchall()  # noqa: E731
        print_reads(name, "measurement", ask)
        if isinstance(attachment, LakeAttachment):
            count = "SELECT sum(file_count) FROM ducklake_table_info('store')"
            (before,) = cursor.execute(count).fetchone() or (0,)
            start_s = time.perf_counter()
            attachment.compact(cursor)
            wall_s = time.perf_counter() - start_s
            (after,) = cursor.execute(count).fetchone() or (0,)
            print(f"  compaction: {before} files to {after} in {wall_s:.1f} s")
            print_reads(f"  {name}, compacted", "measurement", ask)


def print_processes(lake: LakeConfig) -> None:
    """Print rows/s of several processes that write one lake."""
    here = [str(Path(__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(here)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, lake.data_path, lake.postgres],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(NUM_PROCESSES)
    ]
    assert ["open\n"] * NUM_PROCESSES == [writer.stdout.readline() for writer in writers]
    start_s = time.perf_counter()
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert ["done\n"] * NUM_PROCESSES == [writer.stdout.readline() for writer in writers]
    rate = NUM_PROCESSES * 300_000 / (time.perf_counter() - start_s)
    for writer in writers:
        writer.communicate()
    print(f"{NUM_PROCESSES} processes, one lake, 10,000 rows a batch: {rate:,.0f} rows/s together")


def print_plain(address: str, bucket: str) -> None:
    """Print what Parquet objects and manifests without a lake take."""
    import boto3

    s3 = boto3.client("s3", endpoint_url=address, region_name="us-east-1")
    name = bucket.removeprefix("s3://")
    rates, files = [], []
    for size, count in SIZES.items():
        start_s = time.perf_counter()
        for batch in make_batches(size, count):
            checked, _ = check_arrivals([Arrival(batch, pa.table(batch.rows))], size)
            body = io.BytesIO()
            pq.write_table(checked.rows, body)
            key = f"plain/{size}-{batch.batch_index}"
            s3.put_object(Bucket=name, Key=f"{key}.parquet", Body=body.getvalue())
            manifest = json.dumps({"file": key, "num_rows": size})
            s3.put_object(Bucket=name, Key=f"{key}.json", Body=manifest, IfNoneMatch="*")
            if size == 10_000:
                files.append(f"'{bucket}/{key}.parquet'")
        rates.append(f"{size * count / (time.perf_counter() - start_s):>9,.0f}")
    print(f"{'plain, bucket':<16} {' '.join(rates)} rows/s")
    with duckdb.connect(config={"threads": 1}) as connection:
        load_extension(connection, "httpfs")
        connection.execute(
            "CREATE SECRET (TYPE s3, KEY_ID 'bench', SECRET 'bench', REGION 'us-east-1', "
            f"ENDPOINT '{address.removeprefix('http://')}', URL_STYLE 'path', USE_SSL false)"
        )
        rows = f"read_parquet([{', '.join(files)}])"
        label = f"plain, {len(files)} files, {len(files) * 10_000:,} rows"
        print_reads(label, rows, lambda query: connection.execute(query).fetchall())


def main() -> None:
    """Print everything."""
    if missing := find_missing():
        print(f"skipped: {missing}")
        return
    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    print(f"DuckDB {duckdb.__version__}; rows of a batch: {', '.join(f'{n:,}' for n in SIZES)}")
    with (
        TemporaryDirectory() as name,
        serve_postgres(is_durable=True) as postgres,
        serve_s3() as (address, bucket),
    ):
        folder = Path(name)
        in_folder = postgres.lake(str(folder / "rows"), "folder")
        in_bucket = postgres.lake(f"{bucket}/rows", "bucket", address)
        with (
            opened(folder) as file,
            opened(folder, in_folder) as lake,
            opened(folder, in_bucket) as remote,
        ):
            catalogs = {"file": file, "lake, folder": lake, "lake, bucket": remote}
            for label, catalog in catalogs.items():
                print_ingest(label, catalog)
            print_processes(in_folder)
            print(f"reading {READ_ROWS:,} rows, first time / again: {', '.join(QUERIES)}")
            for label, catalog in catalogs.items():
                print_reads_of(label, catalog)
            print_plain(address, bucket)


if __name__ == "__main__":
    main()
