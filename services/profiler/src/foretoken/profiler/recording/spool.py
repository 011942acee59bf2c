"""Rows on disk until the catalog has them, so that no end of this process loses a measurement.

A run has a folder: `run.json`, and a file per batch with a line per row, written as each comes. A
file goes when its batch is acknowledged, the folder when the run is complete. Whoever writes holds
a lock on the folder, which the system lets go when the process ends, however it does.
"""

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, StorageFullError
from foretoken.domain.measurements.measurement import MeasurementBatch, Run
from foretoken.domain.name import check_name, path_inside
from foretoken.wire.arrow import rows_to_table

Row = Mapping[str, Any]

_log = logging.getLogger(__name__)

_RUN, _LOCK, _DONE = "run.json", "lock", "acknowledged"
_BATCH = re.compile(r"\d{8,}\.(jsonl|tmp)")


class RunSpool:
    """The rows of one run that the catalog has not acknowledged.

    `path` is its folder. Every method raises `StorageFullError` where the disk does not take it.
    """

    def __init__(self, root: Path, run: Run) -> None:
        """Keep the rows of `run` under `root`; call `open` before use."""
        self.path = path_inside(root, check_name(run.run_id, "run_id"))
        self._run = run
        self._lock: IO[bytes] | None = None
        self._file: IO[str] | None = None

    def open(self) -> None:
        """Make the folder and take hold of it."""
        with _saving(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _take(self.path)
            _write_whole(self.path / _RUN, json.dumps(schema.encode(self._run)))

    def append(self, batch_index: int, row: Row) -> None:
        """Write a row of the batch that is being filled."""
        with _saving(self.path):
            if self._file is None:
                self._file = _batch_path(self.path, batch_index).open("w", encoding="utf-8")
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def seal(self, batch_index: int, rows: Sequence[Row]) -> None:
        """Write the batch as it will be sent: rows may have been flagged since they came."""
        with _saving(self.path):
            self._close_file()
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            _write_whole(_batch_path(self.path, batch_index), lines)

    def acknowledge(self, batch_index: int) -> None:
        """Forget a batch that the catalog has."""
        with _saving(self.path):
            _write_whole(self.path / _DONE, str(batch_index + 1))
            _batch_path(self.path, batch_index).unlink(missing_ok=True)

    def finish(self) -> None:
        """Forget the run: the catalog has all of it."""
        self.close()
        _forget(self.path)

    def close(self) -> None:
        """Let go of the folder; what is in it stays."""
        self._close_file()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class LeftRun:
    """What an earlier process left of a run; held until `close`."""

    def __init__(self, path: Path, lock: IO[bytes], run: Run) -> None:
        self.path, self.run = path, run
        self._lock = lock

    def batches(self) -> Iterator[MeasurementBatch]:
        """Yield the batches to send, in order, and one without rows that completes the run."""
        done = self.path / _DONE
        index = int(done.read_text(encoding="utf-8")) if done.exists() else 0
        paths = [path for path in self.path.glob("*.jsonl") if _BATCH.fullmatch(path.name)]
        for path in sorted(paths):
            if int(path.stem) < index:  # acknowledged, but not yet deleted when the process ended
                continue
            rows = list(_read_rows(path))
            if rows:
                index = int(path.stem)
                yield MeasurementBatch(batch_index=index, rows=rows_to_table(rows))
                index += 1
        yield MeasurementBatch(batch_index=index, rows=rows_to_table([]), is_last=True)

    def finish(self) -> None:
        """Forget it: the catalog has all of it."""
        self.close()
        _forget(self.path)

    def close(self) -> None:
        """Let go of it."""
        self._lock.close()


def find_left_runs(root: Path) -> Iterator[LeftRun]:
    """Yield what earlier processes left, oldest first, but nothing that a living one writes."""
    folders = [path for path in root.glob("*") if (path / _RUN).is_file() and not path.is_symlink()]
    for path in sorted(folders, key=lambda folder: folder.stat().st_mtime):
        try:
            lock = _take(path)
        except BlockingIOError:
            continue
        try:
            content = json.loads((path / _RUN).read_text(encoding="utf-8"))
            yield LeftRun(path, lock, schema.decode(Run, content, path.name))
        except (ValueError, InvalidRequestError):
            _log.warning("rows of an earlier run cannot be read and are left aside path=%s", path)
        finally:
            lock.close()


def _read_rows(path: Path) -> Iterator[Row]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the process ended while it wrote the last line
            return


def _forget(folder: Path) -> None:
    """Remove the files of a run, and nothing else; the folder, where that was all."""
    batches = [path for path in folder.glob("*") if _BATCH.fullmatch(path.name)]
    # The last to go is what keeps the rest from being taken for a run.
    for path in (*batches, folder / _RUN, folder / _DONE, folder / _LOCK):
        for leftover in (path.with_suffix(".tmp"), path):
            with suppress(OSError):
                leftover.unlink()
    with suppress(OSError):
        folder.rmdir()


def _batch_path(folder: Path, batch_index: int) -> Path:
    return folder / f"{batch_index:08d}.jsonl"


def _take(folder: Path) -> IO[bytes]:
    lock = (folder / _LOCK).open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def _saving(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise StorageFullError(
            f"rows could not be kept in {path}: {err.strerror}; make room and start the same"
            " profile again"
        ) from err
