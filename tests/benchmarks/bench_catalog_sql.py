"""What questions in SQL cost a catalog: how long small ones take, and what runaways do to others.

Prints the median and 99th percentile of other calls over gRPC, alone and while runaways are being
ended one after another, and the growth of the catalog's process. With `--rows` the catalog has so
many; with `--catalog` it is a copy of that file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from bench_catalog_queries import POINT, fill

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import ForetokenError
from foretoken.domain.measurements.measurement import MeasurementFilter, SqlQuery
from foretoken.wire.arrow import read_table

LETTERS = "WITH a AS (SELECT string_agg('a', '') AS s FROM range(100000)) "
RUNAWAYS = (
    LETTERS + "SELECT length(replace(s, 'a', s)) FROM a",  # noqa: S608 - our own text
    LETTERS + "SELECT length(regexp_replace(s, 'a', s, 'g')) FROM a",  # noqa: S608 - as above
    "SELECT length(s::BIGNUM::VARCHAR) FROM (SELECT string_agg('9', '') AS s FROM range(3000000))",
    (
        "WITH a AS (SELECT list(i) AS l FROM range(30000000) AS t(i))"
        " SELECT cardinality(map(l, l)) FROM a"
    ),
    "SELECT count(*) FROM range(1000000000) AS a, range(1000000000) AS b WHERE a <> b",
    (
        "SELECT max(n) FROM (SELECT row_number() OVER (ORDER BY hash(i)) AS n"
        " FROM range(1000000000) AS t(i))"
    ),
)
SMALL = ("SELECT 1", "SELECT count(*) FROM measurements", POINT)
RUNAWAY_S = 4.0


def others_of(client: CatalogClient) -> dict[str, Callable[[], Any]]:
    """Return calls that have nothing to do with SQL."""
    few = MeasurementFilter(operator="rope", device="a40")
    return {
        "list_runs": client.list_runs,
        "list_snapshots": client.list_snapshots,
        "describe_coverage": client.describe_coverage,
        "read_measurements": lambda: read_table(client.read_measurements(few)),
    }


def time_ms(call: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start_s = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start_s)


def sample_ms(client: CatalogClient, seconds: float) -> dict[str, np.ndarray]:
    """Return the times of the other calls, taken in turn for so long."""
    times: dict[str, list[float]] = {name: [] for name in others_of(client)}
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        for name, call in others_of(client).items():
            times[name].append(time_ms(call))
    return {name: np.array(values) for name, values in times.items()}


def run_away(client: CatalogClient, stopped: threading.Event) -> None:
    """Ask what is too much, again and again."""
    while not stopped.is_set():
        for text in RUNAWAYS:
            try:
                read_table(client.query_sql(SqlQuery(text=text, timeout_s=RUNAWAY_S)))
            except ForetokenError:
                continue
            if stopped.is_set():
                return


def resident_mib(pid: int) -> float:
    """Return the memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def compare(client: CatalogClient, pid: int, seconds: float, num_askers: int) -> None:
    """Print the times of other calls without and with runaways, and the memory."""
    sample_ms(client, 2.0)
    before_mib, alone = resident_mib(pid), sample_ms(client, seconds)
    stopped = threading.Event()
    askers = [threading.Thread(target=run_away, args=(client, stopped)) for _ in range(num_askers)]
    for asker in askers:
        asker.start()
    beside = sample_ms(client, seconds)
    after_mib = resident_mib(pid)
    stopped.set()
    for asker in askers:
        asker.join()
    print(f"{'ms':<20} {'alone p50':>10} {'p99':>8} {'beside p50':>10} {'p99':>8} {'p99 ratio':>9}")
    for name, times in alone.items():
        a50, a99 = np.percentile(times, (50, 99))
        b50, b99 = np.percentile(beside[name], (50, 99))
        print(f"{name:<20} {a50:>10.1f} {a99:>8.1f} {b50:>10.1f} {b99:>8.1f} {b99 / a99:>9.2f}")
    print(f"memory of the catalog: {before_mib:.0f} MiB, grown by {after_mib - before_mib:.0f} MiB")


def time_small(client: CatalogClient) -> None:
    """Print how long small questions take: the first, and the median of the next."""
    print(f"{'small questions, ms':<40} {'first':>8} {'median':>8} {'least':>8}")
    for text in SMALL:
        question = SqlQuery(text=text)
        times = [time_ms(lambda q=question: read_table(client.query_sql(q))) for _ in range(21)]
        words = " ".join(text.split())[:40]
        print(f"{words:<40} {times[0]:>8.1f} {np.median(times[1:]):>8.1f} {min(times):>8.1f}")


def main() -> None:
    """Fill a catalog, serve it, ask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--catalog", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--askers", type=int, default=2)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        home = Path(folder)
        path = home / "catalog.duckdb"
        if arguments.catalog:
            shutil.copy(arguments.catalog, path)
        else:
            catalog = CatalogService(CatalogConfig(path=str(path)))
            catalog.open()
            fill(catalog, arguments.rows)
            catalog.close()
        command = [
            sys.executable, "-m", "foretoken.app", "--home", folder,
            "serve", "catalog", "--port", "0", "--metrics-port", "-1",
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            address = process.stdout.readline().split()[-1]
            with CatalogClient.connect(ChannelOptions(address=address)) as client:
                time_small(client)
                compare(client, process.pid, arguments.seconds, arguments.askers)
            process.terminate()


if __name__ == "__main__":
    main()
