"""Jobs shared by the processes of a service: by way of the catalog, one worker each.

The catalog has the state, the request and the files of every job. A process that has a thread free
leases a job and says now and then how far it is, with what its files have got since; where it says
nothing for as long as a lease lasts, another goes on from there. All look every `period_s` for what
has changed.
"""

import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken import __version__
from foretoken.domain.errors import (
    ForetokenError,
    InvalidRequestError,
    JobLeaseError,
    UnknownJobError,
)
from foretoken.domain.job import Job, JobState
from foretoken.domain.job_record import MAX_PIECE_BYTES, JobFile, JobPiece, JobRecord, JobUpdate
from foretoken.domain.name import text_to_name
from foretoken.jobs.folder import KEPT_SUFFIX, LIST_SUFFIX, JobFolder

if TYPE_CHECKING:
    from foretoken.domain.ports import JobRecordsPort

_log = logging.getLogger(__name__)

# Renewed so often within its time, so that one or two answers may be late.
_RENEWALS_PER_LEASE = 3
# While its catalog does not answer, the end of a job waits so much longer each time, up to a limit.
_FIRST_RETRY_S, _MAX_RETRY_S = 0.2, 5.0


@dataclass(slots=True)
class _Held:
    """A job that this process has leased, and the sizes of its files in the catalog."""

    record: JobRecord
    sent: dict[str, int] = field(default_factory=dict)
    # Of the job's present state or files something is not in the catalog.
    has_news: bool = False
    renewal_due_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobListener:
    """What a runner does about news: of others' jobs, and of its own when they are lost."""

    get: Callable[[str], Job]
    see: Callable[[JobRecord], None]
    lose: Callable[[str], None]


class SharedJobs:
    """A process's part in the jobs of a `service`, which `store` keeps."""

    def __init__(
        self,
        store: "JobRecordsPort",
        service: str,
        *,
        lease_s: float = 30.0,
        period_s: float = 1.0,
    ) -> None:
        """Keep where the jobs are; call `open` before use."""
        self._store = store
        self._service = service
        self._lease_s = lease_s
        self._period_s = period_s
        # A pod's name, for people; what tells processes apart is at the end.
        host = text_to_name(socket.gethostname())
        self._worker = f"{host}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._held: dict[str, _Held] = {}
        self._known: dict[str, JobRecord] = {}
        self._newest = 0
        self._is_ending = threading.Event()
        self._is_closed = threading.Event()
        self._looking = threading.Lock()
        self._is_reachable = True
        self._thread = threading.Thread(target=self._keep_on, name="shared jobs", daemon=True)

    def open(self, folder: JobFolder, listener: JobListener) -> None:
        """Begin to look for news; a catalog that does not answer yet is waited for."""
        self._folder = folder
        self._listener = listener
        self._thread.start()

    def close(self) -> None:
        """Look no more; what is held by then stays leased for as long as its lease lasts."""
        self._is_closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def stop_waiting(self) -> None:
        """Let no job's end wait for a catalog that does not answer."""
        self._is_ending.set()

    def holds(self, job_id: str) -> bool:
        """Whether this process has the job."""
        return job_id in self._held

    def create(self, job: Job, plain: Any) -> None:
        """Keep a new job, which any process may take from then on.

        Raises:
            ForetokenError: the catalog's; the job is not created.

        """
        record = JobRecord(
            service=self._service,
            job=job,
            request_json="" if plain is None else json.dumps(plain),
            version=__version__,
        )
        self._store.create_job_record(record)

    def lease(self, job_id: str) -> JobRecord | None:
        """Take a job with its files, if nobody else has."""
        try:
            record = self._store.lease_job(job_id, self._worker, self._lease_s)
            held = _Held(record, {file.name: file.num_bytes for file in record.files})
            for name in held.sent:
                self._download(job_id, name, 0)
        except (JobLeaseError, UnknownJobError):
            return None
        except ForetokenError as err:
            # It is seen again, and whoever sees it first may take it.
            _log.warning("a job could not be taken job_id=%s: %s", job_id, err.message)
            return None
        self._held[job_id] = held
        return record

    def touch(self, job_id: str) -> None:
        """Say that a job has news, which are sent soon."""
        if (held := self._held.get(job_id)) is not None:
            held.has_news = True

    def finish(self, job: Job) -> bool:
        """Store the end of a job with its files; return false where it is another's by now.

        Waits for a catalog that does not answer, as long as the service goes on.
        """
        delay_s = _FIRST_RETRY_S
        while (held := self._held.get(job.job_id)) is not None:
            try:
                with held.lock:
                    record = self._send(held, job, self._lease_s)
            except (JobLeaseError, UnknownJobError):
                break
            except InvalidRequestError:
                _log.exception("the end of a job cannot be stored job_id=%s", job.job_id)
                break
            except ForetokenError as err:
                _log.warning("the end of a job waits job_id=%s: %s", job.job_id, err.message)
                if self._is_ending.wait(delay_s):
                    break
                delay_s = min(2 * delay_s, _MAX_RETRY_S)
            else:
                self._known[job.job_id] = record
                del self._held[job.job_id]
                return True
        self._let_go(job.job_id)
        return False

    def release(self, job: Job) -> None:
        """Let others go on with a job, at once if the catalog answers and else after its lease."""
        held = self._held.pop(job.job_id, None)
        if held is None:
            return
        try:
            with held.lock:
                self._send(held, job, 0.0)
        except ForetokenError as err:
            _log.warning("a job is left to its lease job_id=%s: %s", job.job_id, err.message)

    def want_no_more(self, job_id: str) -> JobRecord:
        """Ask whoever has a job to stop.

        Raises:
            ForetokenError: the catalog's.

        """
        return self._store.stop_job(job_id)

    def look(self) -> None:
        """Take notice of what has changed.

        Raises:
            ForetokenError: the catalog's.

        """
        with self._looking:
            for record in self._store.list_job_records(self._service, self._newest):
                self._newest = max(self._newest, record.change_number)
                self._notice(record)

    def fetch(self, job_id: str, name: str) -> None:
        """Bring a file of another process's job up to date, if it has one of that name."""
        record = self._known.get(job_id)
        if record is None or job_id in self._held:
            return
        sizes = {file.name: file.num_bytes for file in record.files}
        path = self._folder.attachment(job_id, name)
        num_bytes = path.stat().st_size if path.exists() else 0
        if name in sizes and (num_bytes != sizes[name] or not path.exists()):
            # What only grows is continued, where it has not become shorter.
            is_list = name.endswith(LIST_SUFFIX) and num_bytes < sizes[name]
            self._download(job_id, name, num_bytes if is_list else 0)

    def fetch_request(self, job_id: str) -> Any:
        """Return what a job that has ended was asked, and bring what it kept here.

        None where nothing of that is kept.

        Raises:
            ForetokenError: the catalog's.

        """
        try:
            record = self._store.get_job_record(job_id)
            for file in record.files:
                if file.name.endswith(KEPT_SUFFIX):
                    self._download(job_id, file.name, 0)
        except UnknownJobError:
            return None
        return json.loads(record.request_json) if record.request_json else None

    def _notice(self, record: JobRecord) -> None:
        job_id = record.job.job_id
        held = self._held.get(job_id)
        if held is None:
            known = self._known.get(job_id)
            if known is None or known.change_number <= record.change_number:
                self._known[job_id] = record
                self._listener.see(record)
            return
        lease = (record.worker, record.num_leases)
        if record.num_leases >= held.record.num_leases and lease != (
            self._worker,
            held.record.num_leases,
        ):
            self._lose(job_id)
        elif record.is_unwanted:
            self._listener.see(record)

    def _lose(self, job_id: str) -> None:
        _log.warning("another process has taken a job job_id=%s", job_id)
        self._let_go(job_id)
        self._listener.lose(job_id)

    def _let_go(self, job_id: str) -> None:
        """Look again for a job that was held: what others made of it may have been passed over."""
        if self._held.pop(job_id, None) is not None:
            self._newest = 0

    def _keep_on(self) -> None:
        while True:
            try:
                self.look()
                self._is_reachable = True
            except ForetokenError as err:
                if self._is_reachable:
                    _log.warning("the catalog does not answer for jobs: %s", err.message)
                self._is_reachable = False
            except Exception:  # noqa: BLE001
                # The boundary of the thread: leases are renewed as long as the process lives.
                _log.exception("shared jobs")
            for job_id in list(self._held):
                self._renew(job_id)
            if self._is_closed.wait(self._period_s):
                return

    def _renew(self, job_id: str) -> None:
        """Send the news of a job that is held, or only that it is being worked on, where due."""
        held = self._held.get(job_id)
        if held is None:
            return
        held.renewal_due_s -= self._period_s
        # An end that is being stored says more than this would.
        if not (held.has_news or held.renewal_due_s <= 0) or not held.lock.acquire(blocking=False):
            return
        try:
            held.has_news = False
            record = self._send(held, self._listener.get(job_id), self._lease_s)
            held.renewal_due_s = self._lease_s / _RENEWALS_PER_LEASE
            self._notice(record)
        except (JobLeaseError, UnknownJobError):
            self._lose(job_id)
        except ForetokenError as err:
            held.has_news = True
            _log.warning("news of a job wait job_id=%s: %s", job_id, err.message)
        finally:
            held.lock.release()

    def _send(self, held: _Held, job: Job, lease_s: float) -> JobRecord:
        """Store a state of a job with what its files have got; an end with all its files."""
        is_over = job.state.is_final
        before = held.record.job
        pieces = self._new_pieces(job, held)
        waiting: list[JobPiece] = []
        for piece in pieces:
            if waiting and _num_bytes(waiting) + len(piece.content) > MAX_PIECE_BYTES:
                self._update(held, before if is_over else job, self._lease_s, waiting)
                waiting = []
            waiting.append(piece)
        is_done = job.state is JobState.SUCCEEDED
        dropped = tuple(name for name in held.sent if is_done and name.endswith(KEPT_SUFFIX))
        return self._update(held, job, lease_s, waiting, dropped)

    def _update(
        self,
        held: _Held,
        job: Job,
        lease_s: float,
        pieces: list[JobPiece],
        dropped: tuple[str, ...] = (),
    ) -> JobRecord:
        update = JobUpdate(
            job=job,
            worker=self._worker,
            num_leases=held.record.num_leases,
            lease_s=lease_s,
            pieces=tuple(pieces),
            dropped=dropped,
        )
        held.record = record = self._store.update_job(update)
        held.sent = {file.name: file.num_bytes for file in record.files}
        return record

    def _new_pieces(self, job: Job, held: _Held) -> Iterator[JobPiece]:
        is_over, is_done = job.state.is_final, job.state is JobState.SUCCEEDED
        for name, path in self._folder.shared_files(job.job_id).items():
            is_list, is_kept = name.endswith(LIST_SUFFIX), name.endswith(KEPT_SUFFIX)
            if (is_done and is_kept) or not (is_over or is_list or is_kept):
                continue
            sent = held.sent.get(name, -1)
            size = path.stat().st_size
            if not (is_list or is_kept):
                # What is attached is written whole, and perhaps by an earlier lease.
                start = 0
            elif size == sent:
                continue
            else:
                start = min(max(sent, 0), size)
            yield from _read_pieces(JobFile(name=name, num_bytes=sent), path, start)

    def _download(self, job_id: str, name: str, first_byte: int) -> None:
        path = self._folder.attachment(job_id, name)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            kept = path.read_bytes()[:first_byte] if first_byte else b""
            with temporary.open("wb") as file:
                file.write(kept)
                for piece in self._store.read_job_file(job_id, name, first_byte):
                    file.write(piece)
            temporary.replace(path)
        except OSError as err:
            raise self._folder.full(err) from err
        finally:
            temporary.unlink(missing_ok=True)


def _num_bytes(pieces: list[JobPiece]) -> int:
    return sum(len(piece.content) for piece in pieces)


def _read_pieces(stored: JobFile, path: Path, start: int) -> Iterator[JobPiece]:
    """Yield a file from a byte on, of a list only whole lines; nothing where that changes nothing.

    `stored` is what the catalog has of it, of -1 bytes where it has none.
    """
    is_list, has_begun, is_whole = stored.name.endswith(LIST_SUFFIX), False, False
    with path.open("rb") as file:
        file.seek(start)
        while not is_whole:
            content = file.read(MAX_PIECE_BYTES)
            is_whole = len(content) < MAX_PIECE_BYTES
            if is_list and is_whole:
                content = content[: content.rfind(b"\n") + 1]
            if not content and (has_begun or start == stored.num_bytes):
                return
            yield JobPiece(name=stored.name, first_byte=start, content=content)
            start, has_begun = start + len(content), True


def interrupted(job: Job) -> Job:
    """Return a job as it waits for another process."""
    return replace(
        job,
        state=JobState.QUEUED,
        message="interrupted",
        finished_at="",
        error_reason="",
        error_message="",
    )
