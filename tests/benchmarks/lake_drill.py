"""A lake under load while its processes are killed, and then brought back as it was at a moment.

Three writers record in a lake in PostgreSQL and a bucket, ten readers look batches up in SQL; every
ten seconds one of them is killed (SIGKILL) and started again. PostgreSQL keeps its log, as an
operator sets it up, and a base backup is taken at the beginning. Prints what was acknowledged, what
is stored, and what a server restored to the middle of it has. Rows are compared by batch.
Needs PostgreSQL and the extra `lake`: run it with `.venv-lake` (`make setup-lake`). The bucket is
moto's, a Python program on this machine.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench_catalog_ingest import make_rows
from lake_servers import Postgres, find_missing, serve_postgres, serve_s3

from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import CatalogBusyError
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind

_NUM_WRITERS, _NUM_READERS = 3, 10
_KILL_S = 10.0
_BATCH_ROWS = 500
# Between two queries of a reader.
_PAUSE_S = 1.0
# The latest that a receipt may be printed after its commit.
_RECEIPT_S = 1.0
_ATTEMPTS_S = 60.0
_OPEN = "open"
_STORED = """
    SELECT run_id, batch_index, count(row_index)
    FROM batch LEFT JOIN measurement USING (batch_number) GROUP BY ALL
"""


def _open(lake: LakeConfig) -> CatalogService:
    """Open it, or try again: PostgreSQL may not yet have noticed who was killed."""
    deadline_s = time.monotonic() + _ATTEMPTS_S
    while True:
        catalog = CatalogService(CatalogConfig(path="unused", num_threads=1, lake=lake))
        try:
            catalog.open()
        except CatalogBusyError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)
        else:
            return catalog


def _write(catalog: CatalogService, run_id: str) -> None:
    """Record without end; print the index and the time of every receipt."""
    run = Run(run_id=run_id, kind=RunKind.PROFILE, tool="drill")
    rows = make_rows(_BATCH_ROWS, 0)
    sent = (MeasurementBatch(batch_index=index, rows=rows) for index in itertools.count())
    for receipt in catalog.record(run, sent):
        print(receipt.batch_index, time.time(), flush=True)


def _read(catalog: CatalogService) -> None:
    """Look at the newest batch without end; print the seconds of every query."""
    newest = "SELECT max(batch_number) FROM batch"
    query = f"SELECT count(*) FROM measurement WHERE batch_number = ({newest})"  # noqa: S608 - no input
    while True:
        start_s = time.perf_counter()
        with catalog._store.cursor() as cursor:
            (num_rows,) = cursor.execute(query).fetchone() or (0,)
        assert num_rows in (0, _BATCH_ROWS), f"{num_rows} rows of a batch"
        print(time.perf_counter() - start_s, flush=True)
        time.sleep(_PAUSE_S)


def _stored(lake: LakeConfig) -> dict[tuple[str, int], int]:
    """Return the rows of every batch, read from the files."""
    with closing(_open(lake)) as catalog, catalog._store.cursor() as cursor:
        rows = cursor.execute(_STORED).fetchall()
    return {(run_id, index): num_rows for run_id, index, num_rows in rows}


@dataclass
class _Drill:
    """Processes on a lake, and what they printed."""

    lake: LakeConfig
    receipts: dict[tuple[str, int], float] = field(default_factory=dict)
    latencies_s: list[float] = field(default_factory=list)
    ends: Counter[int] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    num_started: int = 0
    num_open: int = 0

    def start(self, name: str) -> None:
        """Start a writer (of a run of its own) or a reader, and collect what it prints."""
        self.num_started += 1
        run_id = f"{name}-{self.num_started}"
        command = [sys.executable, __file__, "--role", name.partition("-")[0], "--run", run_id]
        command += ["--lake", json.dumps(asdict(self.lake))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.processes[name] = process
        thread = threading.Thread(target=self._collect, args=(process, run_id))
        thread.start()
        self.threads.append(thread)

    def kill(self, name: str) -> None:
        """Kill one and start another in its place."""
        self.processes[name].kill()
        self.kills[name.partition("-")[0]] += 1
        self.start(name)

    def end(self) -> None:
        """Kill all."""
        for process in self.processes.values():
            process.kill()
        for thread in self.threads:
            thread.join()

    def _collect(self, process: subprocess.Popen[str], run_id: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):
                break
            first, *second = line.split()
            if first == _OPEN:
                self.num_open += 1
            elif second:
                self.receipts[run_id, int(first)] = float(second[0])
            else:
                self.latencies_s.append(float(first))
        self.ends[process.wait()] += 1


def _compare(stored: dict[tuple[str, int], int], acknowledged: set[tuple[str, int]]) -> str:
    lost = len(acknowledged - stored.keys())
    torn = sum(num_rows != _BATCH_ROWS for num_rows in stored.values())
    return f"{len(acknowledged):,} acknowledged, {lost} of them missing, {torn} not whole"


def _archive_log(postgres: Postgres) -> None:
    """Keep all that a server logs; it is started anew for that."""
    postgres.run("mkdir", str(postgres.folder / "archive"))
    command = f"cp %p {postgres.folder}/archive/%f"
    postgres.configure("archive_mode = on", f"archive_command = '{command}'")
    postgres.stop()
    postgres.start()


def _restore(postgres: Postgres, base: Path, moment_s: float) -> Postgres:
    """Return a server, not yet started, from a base backup and the log up to a moment."""
    folder = postgres.folder / "restored"
    postgres.run("mkdir", str(folder))
    postgres.run("cp", "--archive", str(base), str(folder / "data"))
    postgres.run("touch", str(folder / "data" / "recovery.signal"))
    connection = postgres.connection_string.replace(str(postgres.folder), str(folder))
    restored = Postgres(connection, folder)
    restored.configure(
        f"unix_socket_directories = '{folder}'",
        "archive_mode = off",
        f"restore_command = 'cp {postgres.folder}/archive/%f %p'",
        f"recovery_target_time = '{datetime.fromtimestamp(moment_s, UTC).isoformat()}'",
        "recovery_target_action = 'promote'",
    )
    return restored


def _run_load(drill: _Drill, seconds: float) -> float:
    """Kill one every ten seconds; return the moment of the middle, in s since 1970."""
    names = [f"write-{number}" for number in range(_NUM_WRITERS)]
    names += [f"read-{number}" for number in range(_NUM_READERS)]
    for name in names:
        drill.start(name)
    while drill.num_open < len(names):
        time.sleep(0.1)
    rng = random.Random(0)  # noqa: S311 - which is killed
    middle_s, start_s = 0.0, time.monotonic()
    while (passed_s := time.monotonic() - start_s) < seconds:
        if not middle_s and passed_s >= seconds / 2:
            middle_s = time.time()
        time.sleep(_KILL_S)
        drill.kill(rng.choice(names))
        print(f"{passed_s:5.0f} s: {len(drill.receipts):,} batches", file=sys.stderr)
    drill.end()
    return middle_s


def _print_drill(seconds: float) -> None:
    with serve_postgres(is_durable=True) as postgres, serve_s3() as (address, bucket):
        _archive_log(postgres)
        drill = _Drill(postgres.lake(f"{bucket}/rows", "drill", address))
        _open(drill.lake).close()
        base = postgres.folder / "base"
        postgres.back_up(base)
        middle_s = _run_load(drill, seconds)
        queries = sorted(drill.latencies_s)
        p99_ms = 1e3 * queries[int(0.99 * len(queries))]
        stored = _stored(drill.lake)
        kills = ", ".join(f"{count} times who {role}s" for role, count in drill.kills.items())
        print(f"killed {kills}; others that ended: {sum(drill.ends.values()) - drill.ends[-9]}")
        print(f"{len(queries):,} queries, p99 {p99_ms:,.0f} ms")
        print(f"the lake: {_compare(stored, set(drill.receipts))}")
        postgres.execute("SELECT pg_switch_wal()")
        postgres.execute("CHECKPOINT")
        before = {key for key, time_s in drill.receipts.items() if time_s <= middle_s}
        later = {k for k, time_s in drill.receipts.items() if time_s > middle_s + _RECEIPT_S}
        start_s = time.perf_counter()
        with _restore(postgres, base, middle_s).running() as server:
            back = _stored(server.lake(f"{bucket}/rows", "drill", address))
            wall_s = time.perf_counter() - start_s
        print(f"restored to its middle in {wall_s:.1f} s: {_compare(back, before)};")
        print(f"  of {len(later):,} acknowledged later {len(later & back.keys())} are there")


def main() -> None:
    """Run the drill, or one of its processes."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--role", choices=("write", "read"), help="of a process of the drill")
    parser.add_argument("--run", help="what a writer records")
    parser.add_argument("--lake", type=json.loads, help="where")
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "drill", "AWS_SECRET_ACCESS_KEY": "drill"}
    if options.role:
        catalog = _open(LakeConfig(**options.lake))
        print(_OPEN, flush=True)
        if options.role == "write":
            _write(catalog, options.run)
        _read(catalog)
    elif missing := find_missing():
        print(f"skipped: {missing}")
    else:
        _print_drill(options.seconds)


if __name__ == "__main__":
    main()
