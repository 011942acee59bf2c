"""Acknowledged is on disk, whatever happens to the process or the disk afterwards."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService

_NUM_KILLS = 10
_BATCH_ROWS = 50

_INGEST = """
import itertools, sys
from catalog_rows import gemms, run
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurement import MeasurementBatch

service = CatalogService(CatalogConfig(path=sys.argv[1], num_threads=1))
service.open()
rows = gemms(range(1, int(sys.argv[3]) + 1))
batches = (MeasurementBatch(batch_index=i, rows=rows) for i in itertools.count())
for receipt in service.record(run(sys.argv[2]), batches):
    print(receipt.batch_index, flush=True)
"""

# A limit on the size of files stands in for a full disk.
_FILL_DISK = """
import resource, signal, sys
from catalog_rows import batches, gemms, run
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import CatalogBusyError

service = CatalogService(CatalogConfig(path=sys.argv[1], num_threads=1))
service.open()
list(service.record(run("before"), batches(gemms([1, 2]))))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    list(service.record(run("after"), batches(gemms(range(1, 5000)))))
except CatalogBusyError as err:
    print(err.message)
"""


def _start(script: str, *arguments: str) -> subprocess.Popen[str]:
    # What this test can import, `catalog_rows` among it, its processes can.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def _ingest_and_kill(path: Path, run_id: str, delay_s: float) -> list[int]:
    """Return the batches that a process acknowledged until it was killed."""
    with _start(_INGEST, str(path), run_id, str(_BATCH_ROWS)) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline())]
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        # A line cut short by the kill is no acknowledgement.
        rest = process.stdout.read().splitlines(keepends=True)
        acknowledged += [int(line) for line in rest if line.endswith("\n")]
    return acknowledged


@pytest.mark.slow
def test_no_acknowledged_batch_is_lost_and_none_is_partial(tmp_path: Path) -> None:
    path = tmp_path / "catalog.duckdb"
    moments = random.Random(20260101)  # noqa: S311 - moments to kill at, not secrets
    acknowledged: dict[str, list[int]] = {}
    for number in range(_NUM_KILLS):
        run_id = f"run-{number}"
        acknowledged[run_id] = _ingest_and_kill(path, run_id, moments.uniform(0, 0.3))
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1))
    service.open()
    with service._store.cursor() as cursor:
        receipts = set(cursor.execute("SELECT run_id, batch_index FROM batch").fetchall())
        stored = cursor.execute(
            "SELECT run_id, batch_index, count(*) FROM measurement GROUP BY ALL"
        ).fetchall()
    service.close()
    promised = {(run_id, index) for run_id, indices in acknowledged.items() for index in indices}
    assert _NUM_KILLS <= len(promised)
    assert set() == promised - receipts
    assert {(run_id, index, _BATCH_ROWS) for run_id, index in receipts} == set(stored)
    # At most the batch in flight was stored without its process living to say so.
    assert len(receipts) <= len(promised) + _NUM_KILLS


def test_a_full_disk_is_said_and_what_was_stored_stays(tmp_path: Path) -> None:
    path = tmp_path / "catalog.duckdb"
    with _start(_FILL_DISK, str(path)) as process:
        said, _ = process.communicate()
    assert "cannot write to its disk" in said
    service = CatalogService(CatalogConfig(path=str(path), num_threads=1))
    service.open()
    runs = [(summary.run.run_id, summary.num_rows) for summary in service.list_runs()]
    service.close()
    assert [("before", 2)] == runs
