"""Record into a catalog from processes that are killed at random moments.

Run as a program with the catalog's path, the number of kills and a seed; prints one JSON line per
acknowledged batch, [run, batch]. One interpreter forks them all: starting one anew costs more than
the ingest.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count, islice

from catalog_rows import gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.recording.intake import Arrival, check_arrivals
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import MeasurementBatch, RunKind

_READY = "ready"
# A process is killed when it has acknowledged up to so many batches, and at most so long after.
_MAX_RECEIPTS = 6
_MAX_DELAY_S = 0.03
# How a process records: the streams that run at once, and the rows of their batches. A group of the
# large ones goes past the log, straight to its place in the file.
_SMALL = (
    ((RunKind.PROFILE,), 20),
    ((RunKind.IMPORT,), 20),
    ((RunKind.PROFILE,) * 4, 20),
    ((RunKind.IMPORT, RunKind.IMPORT, RunKind.PROFILE), 20),
)
# Every fourth process merges the log all the time, so that some are killed while they do.
_MAX_LOG_AGES_S = (60.0, 60.0, 60.0, 0.01)
_WAYS = (*_SMALL, *_SMALL, ((RunKind.IMPORT,), 1000))


def _endless_batches(num_rows: int) -> Iterator[MeasurementBatch]:
    rows = gemms(range(1, num_rows + 1))
    return (MeasurementBatch(batch_index=index, rows=rows) for index in count())


def _ingest(path: str, number: int, sink: int) -> None:
    """Record until killed, telling what was acknowledged: one write each, so that none is torn."""

    def say(*words: object) -> None:
        os.write(sink, (json.dumps(words) + "\n").encode())

    max_log_age_s = _MAX_LOG_AGES_S[number % len(_MAX_LOG_AGES_S)]
    service = CatalogService(CatalogConfig(path=path, num_threads=1, max_log_age_s=max_log_age_s))
    service.open()
    say(_READY)
    kinds, num_rows = _WAYS[number % len(_WAYS)]

    def record(run_id: str, kind: RunKind) -> None:
        for receipt in service.record(run(run_id, kind), _endless_batches(num_rows)):
            say(receipt.run_id, receipt.batch_index)

    threads = [
        threading.Thread(target=record, args=(f"run-{number}-{place}", kind))
        for place, kind in enumerate(kinds)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _read_until_killed(source: int, pid: int, num_lines: int, delay_s: float) -> bytes:
    """Return what a process said; kill it some time after it said so much, and wait for it."""
    said = b""
    while said.count(b"\n") < num_lines:
        piece = os.read(source, 1 << 16)
        if not piece:
            message = f"the process ended by itself after {said!r}"
            raise RuntimeError(message)
        said += piece
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    while piece := os.read(source, 1 << 16):
        said += piece
    os.waitpid(pid, 0)
    return said


def main() -> None:
    """Fork and kill; print what was acknowledged."""
    path, num_kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Operators and devices are read once, here, and not by every process.
    check_arrivals([Arrival(batch, batch.rows) for batch in islice(_endless_batches(1), 1)], 100)
    moments = random.Random(seed)  # noqa: S311 - moments to kill at, not secrets
    for number in range(num_kills):
        source, sink = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(source)
            _ingest(path, number, sink)
            os._exit(1)
        os.close(sink)
        num_lines = 1 + moments.randrange(_MAX_RECEIPTS)
        said = _read_until_killed(source, pid, num_lines, moments.uniform(0, _MAX_DELAY_S))
        os.close(source)
        for line in said.decode().splitlines():
            if json.loads(line) != [_READY]:
                sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
