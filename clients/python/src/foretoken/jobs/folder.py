"""The files of jobs in a folder: states, requests, results, and what was found on the way.

States and results are JSON files, written whole by rename, so they outlive the caller and the
process. A job that goes on after a restart has its request with them, the files it keeps until it
ends well or is cancelled, and a lock, held by the process that runs it and let go by the system
when that dies.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, StorageFullError
from foretoken.domain.job import Job
from foretoken.domain.name import check_name, is_name, path_inside

if sys.platform != "win32":
    import fcntl

_log = logging.getLogger(__name__)

# The name under which a whole folder is locked.
_FOLDER_LOCK = "folder"
# What the names of lists end with that grow while a job runs, and of files kept until it ends.
LIST_SUFFIX, KEPT_SUFFIX = ".jsonl", ".kept"
RESULT_FILE = "result.json"
_STATE = "job.json"
# Files of a job that are of no use once it has ended.
_UNTIL_THE_END = ("request.json", "lock", f"*{KEPT_SUFFIX}")
# Files of a job that are this process's own matter.
_OWN = (_STATE, "request.json", "lock")
# So many processes of one service use a folder at once; more are a mistake.
_MAX_PROCESSES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRequest:
    """What a job was asked, as plain data, and how often it was begun."""

    request: Any
    num_starts: int = 1


class JobFolder:
    """Reads and writes the files of jobs."""

    def __init__(self, path: Path) -> None:
        """Keep the path; call `open` before use."""
        self.path = path
        self._locks: dict[str, int] = {}

    def open(self) -> None:
        """Make the folder.

        Raises:
            InvalidRequestError: it cannot be made.

        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise InvalidRequestError.of_field(
                "state_folder", f"{self.path}: {err.strerror}"
            ) from err

    def open_alone(self) -> None:
        """Take a folder in this one that no other living process has, without what was in it.

        Raises:
            InvalidRequestError: none can be made.

        """
        base = self.path
        for number in range(_MAX_PROCESSES):
            self.path = base / f"shared-{number}"
            self.open()
            if self.claim(_FOLDER_LOCK):
                for path in self.path.iterdir():
                    if path != self._file(_FOLDER_LOCK, "lock") and path.is_file():
                        path.unlink(missing_ok=True)
                return
        raise InvalidRequestError.of_field(
            "state_folder", f"{base} is used by {_MAX_PROCESSES} processes; name another"
        )

    def let_go_alone(self) -> None:
        """Leave the folder to the next process that wants one."""
        self.let_go(_FOLDER_LOCK)

    def shared_files(self, job_id: str) -> Mapping[str, Path]:
        """Return the files of a job that other processes need, by their names within it."""
        found = {
            path.name.removeprefix(f"{job_id}."): path
            for path in sorted(self.path.glob(f"{check_name(job_id, 'job_id')}.*"))
        }
        return {
            name: path
            for name, path in found.items()
            if name not in _OWN and not name.endswith(".tmp")
        }

    def load_jobs(self) -> Iterator[Job]:
        """Yield the jobs of earlier processes, and of others that run now."""
        for path in sorted(self.path.glob(f"*.{_STATE}")):
            job = _load(path)
            if job is not None and is_name(job.job_id) and self._file(job.job_id, _STATE) == path:
                yield job
            elif job is not None:
                _log.warning("the state of another job is left aside path=%s", path)

    def load_job(self, job_id: str) -> Job | None:
        """Return a job as it is in its file now."""
        return _load(self._file(job_id, _STATE))

    def save_job(self, job: Job) -> None:
        """Write the state of a job; where that fails only the next process does not learn it."""
        try:
            _write_whole(self._file(job.job_id, _STATE), json.dumps(schema.encode(job)))
        except OSError as err:
            _log.warning("the state of a job could not be saved job_id=%s: %s", job.job_id, err)

    def save_result(self, job_id: str, outcome: object) -> None:
        """Write the result of a job.

        Raises:
            StorageFullError: it cannot be written.

        """
        self._write(self._file(job_id, RESULT_FILE), schema.encode(outcome))

    def load_result(self, job_id: str) -> Any:
        """Return the result of a job as plain data."""
        return json.loads(self._file(job_id, RESULT_FILE).read_text("utf-8"))

    def save_request(self, job_id: str, stored: StoredRequest) -> None:
        """Write what a job was asked.

        Raises:
            StorageFullError: it cannot be written.

        """
        self._write(self._file(job_id, "request.json"), schema.encode(stored))

    def load_request(self, job_id: str) -> StoredRequest | None:
        """Return what a job was asked, none where it does not go on after a restart."""
        try:
            text = self._file(job_id, "request.json").read_text("utf-8")
            return schema.decode(StoredRequest, json.loads(text))
        except (OSError, ValueError, InvalidRequestError):
            return None

    def attachment(self, job_id: str, name: str) -> Path:
        """Return the path of a file that stays with the result of a job."""
        return self._file(job_id, name)

    def kept_file(self, job_id: str, name: str) -> Path:
        """Return the path of a file that stays until the job ends well or is cancelled."""
        return self._file(job_id, f"{name}{KEPT_SUFFIX}")

    def items_file(self, job_id: str, name: str) -> Path:
        """Return the path of a list that grows while the job runs."""
        return self._file(job_id, f"{name}{LIST_SUFFIX}")

    def claim(self, job_id: str) -> bool:
        """Take a job for this process, unless another has it."""
        if job_id in self._locks:
            return True
        try:
            lock = os.open(self._file(job_id, "lock"), os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as err:
            raise self.full(err) from err
        if not _lock(lock):
            os.close(lock)
            return False
        self._locks[job_id] = lock
        return True

    def let_go(self, job_id: str) -> None:
        """Leave a job to whatever process claims it next."""
        lock = self._locks.pop(job_id, None)
        if lock is not None:
            os.close(lock)

    def hand_on(self, job_id: str, heir: str) -> None:
        """Give what a failed job kept to another one, and remove what else it left."""
        for path in self.path.glob(f"{job_id}.*{KEPT_SUFFIX}"):
            path.replace(self._file(heir, path.name.removeprefix(f"{job_id}.")))
        self.tidy(job_id)

    def tidy(self, job_id: str) -> None:
        """Remove what an ended job needs no more."""
        for pattern in _UNTIL_THE_END:
            for path in self.path.glob(f"{job_id}.{pattern}"):
                path.unlink(missing_ok=True)
        self.let_go(job_id)

    def _write(self, path: Path, content: Any) -> None:
        try:
            _write_whole(path, json.dumps(content))
        except OSError as err:
            raise self.full(err) from err

    def _file(self, job_id: str, name: str) -> Path:
        return path_inside(self.path, f"{check_name(job_id, 'job_id')}.{name}", "job_id")

    def full(self, err: OSError) -> StorageFullError:
        """Return the error of this folder where it takes no more."""
        return storage_full(self.path, err)


class ItemFile:
    """A list of a job that only grows, a line of JSON for each item, each item under a key.

    A line that a crash tore off is dropped when the file is opened.
    """

    def __init__(self, path: Path) -> None:
        """Find what an earlier process wrote."""
        self._path = path
        self._keys: set[str] = set()
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        self._keys.update(json.loads(line)["key"] for line in whole.splitlines())

    def __len__(self) -> int:
        """How many items there are."""
        return len(self._keys)

    def append(self, key: str, item: Any) -> bool:
        """Add an item, and say whether it was new: what has its key already stays.

        Raises:
            StorageFullError: it cannot be written.

        """
        if key in self._keys:
            return False
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "item": item}) + "\n")
        except OSError as err:
            raise storage_full(self._path.parent, err) from err
        self._keys.add(key)
        return True


def read_items(path: Path, first: int) -> Iterator[Any]:
    """Yield the items of a list, as plain data, from the `first` on to those that are whole."""
    if not path.exists():
        return
    with path.open("r", encoding="utf-8") as file:
        for number, line in enumerate(file):
            if not line.endswith("\n"):
                return
            if number >= first:
                yield json.loads(line)["item"]


def storage_full(folder: Path, err: OSError) -> StorageFullError:
    """Return the error of a folder that takes no more."""
    return StorageFullError(
        f"the result could not be saved in {folder}: {err.strerror}; make room and create the job"
        " again"
    )


def _load(path: Path) -> Job | None:
    """Return the job of a file, none where a crash of the machine left it torn."""
    try:
        return schema.decode(Job, json.loads(path.read_text(encoding="utf-8")), path.name)
    except (OSError, ValueError, InvalidRequestError):
        _log.warning("the state of a job cannot be read and is left aside path=%s", path)
        return None


def _lock(file: int) -> bool:
    """Lock a file, and say whether nobody else has; there are no such locks on Windows."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
