"""Compact a catalog in processes that are killed at every line of it, while others record.

Run as a program with the catalog's path; prints one JSON line per process: what it was killed at,
and the runs that it had acknowledged. One interpreter forks them all.
"""

import json
import os
import signal
import sys
import threading
from itertools import count
from types import FrameType
from typing import Any

from catalog_rows import batches, gemms, run

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.recording.intake import Arrival, check_arrivals
from foretoken.catalog.service import CatalogService
from foretoken.catalog.storage.attachment import FileAttachment
from foretoken.catalog.upkeep import compaction
from foretoken.catalog.upkeep.backup import CatalogCopy

_TRACED = tuple(
    function.__code__
    for function in (
        compaction.compact,
        compaction.replace_by,
        compaction._catch_up,
        CatalogCopy.__enter__,
        FileAttachment.replace,
        FileAttachment.attach,
    )
)


class _KillsItself:
    """A trace function: ends the process before the last of so many lines that it comes to."""

    def __init__(self, num_lines: int, sink: int) -> None:
        self._num_lines = num_lines
        self._sink = sink
        self._seen: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code not in _TRACED:
            return None
        place = (frame.f_code.co_name, frame.f_lineno)
        if event == "line" and place not in self._seen:
            self._seen.add(place)
            if len(self._seen) == self._num_lines:
                say(self._sink, "killed", *place)
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def say(sink: int, *words: object) -> None:
    """Write a line at once, so that none is torn."""
    os.write(sink, (json.dumps(words) + "\n").encode())


def _compact(path: str, num_lines: int, sink: int) -> None:
    """Compact while a thread records, up to a line; end by itself where there are not so many."""
    service = CatalogService(CatalogConfig(path=path, num_threads=1))
    service.open()
    begun = threading.Event()

    def record() -> None:
        for number in count():
            run_id = f"run-{num_lines}-{number}"
            list(service.record(run(run_id), batches(gemms(range(1, 21)))))
            say(sink, "acknowledged", run_id)
            begun.set()

    threading.Thread(target=record, daemon=True).start()
    begun.wait()
    sys.settrace(_KillsItself(num_lines, sink))
    service.compact()
    say(sink, "compacted")


def _wait(source: int, pid: int) -> list[list[Any]]:
    """Return what a process said until its end."""
    with open(source, "rb") as said:
        lines = [json.loads(line) for line in said]
    os.waitpid(pid, 0)
    return lines


def main() -> None:
    """Fork and wait, until one came to the end."""
    # Operators and devices are read once, here, and not by every process.
    check_arrivals([Arrival(batch, batch.rows) for batch in batches(gemms([1]))], 100)
    for num_lines in count(1):
        source, sink = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(source)
            _compact(sys.argv[1], num_lines, sink)
            os._exit(0)
        os.close(sink)
        said = _wait(source, pid)
        acknowledged = [words[1] for words in said if words[0] == "acknowledged"]
        (ended,) = (words for words in said if words[0] != "acknowledged")
        sys.stdout.write(json.dumps([ended, acknowledged]) + "\n")
        if ended == ["compacted"]:
            return


if __name__ == "__main__":
    main()
