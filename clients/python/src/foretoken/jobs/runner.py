"""Run jobs in threads and keep their states and results in a folder.

A job that was running when its process died is found failed, reason INTERRUPTED; one that was
created with its request goes on, under the same name, where its kind has a handler.
"""

import dataclasses
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from foretoken.domain import schema
from foretoken.domain.errors import (
    CancelledJobError,
    ForetokenError,
    InterruptedJobError,
    InvalidRequestError,
    JobNotFinishedError,
    QueueFullError,
    ServiceUnavailableError,
    UnknownJobError,
)
from foretoken.domain.job import Job, JobState, WakingWatch, error_of_job
from foretoken.jobs.folder import ItemFile, JobFolder, StoredRequest, read_items
from foretoken.jobs.progress import JobProgress
from foretoken.wire import trace

__all__ = ["JobProgress", "JobRunner", "Resume", "Work"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

# A job that was begun so often, and each time ended its process, is not begun again.
_MAX_STARTS = 5
# More are no news: every state of a job that is watched has them all.
_MAX_NOTICES = 100


Work = Callable[[JobProgress], object]
# Makes the work of a job that goes on from its request, as plain data.
Resume = Callable[[Any], Work]


class JobRunner:
    """Queue of jobs over a few threads. The work returns the dataclass that is its result.

    `num_workers` jobs run at once; a kind named in `num_workers_by_kind` has so many threads of its
    own, so that neither waits for the other.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_workers: int = 1,
        max_queued: int = 64,
        num_workers_by_kind: Mapping[str, int] | None = None,
        on_success: Callable[[Job], None] = lambda _: None,
    ) -> None:
        """Keep job files under `folder`; call `open` before use.

        `on_success` is given every job that has just succeeded, in the thread that ran it.
        """
        self._folder = JobFolder(folder)
        self.max_queued = max_queued
        self._on_success = on_success
        self._jobs: dict[str, Job] = {}
        self._cancelled: dict[str, threading.Event] = {}
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="job")
        self._threads_by_kind = {
            kind: ThreadPoolExecutor(number, thread_name_prefix=kind)
            for kind, number in (num_workers_by_kind or {}).items()
        }
        self._handlers: Mapping[str, Resume] = {}
        # Jobs with a request: those that run here, and those that were left and go on when asked.
        self._resumable: set[str] = set()
        self._left: set[str] = set()
        self._unwanted: set[str] = set()
        self._items: dict[tuple[str, str], ItemFile] = {}
        self._num_published: Counter[str] = Counter()
        self._is_closing = False

    def open(self, handlers: Mapping[str, Resume] | None = None, *, resumes: bool = True) -> None:
        """Load the jobs of earlier processes; those that never ended go on, or are failed.

        A job goes on if it was created with its request and `handlers` knows its kind: now, or
        without `resumes` as soon as it is created again or watched. One that another process runs
        is left to that.

        Raises:
            InvalidRequestError: the folder cannot be made.

        """
        self._handlers = handlers or {}
        self._folder.open()
        for job in self._folder.load_jobs():
            if job.state.is_final:
                self._jobs[job.job_id] = job
            elif not self._folder.claim(job.job_id):
                continue
            elif job.kind not in self._handlers or not self._folder.load_request(job.job_id):
                self._fail_interrupted(job, "the service stopped while the job ran")
            else:
                self._take_over(job)
                if not (resumes and self._go_on(job.job_id)):
                    self._folder.let_go(job.job_id)

    def close(self) -> None:
        """Stop what runs and wait for it; what still waits never runs.

        Jobs with a request stay as they are for the next process, the others are cancelled.
        """
        with self._changed:
            self._is_closing = True
        for event in list(self._cancelled.values()):
            event.set()
        for threads in (self._threads, *self._threads_by_kind.values()):
            threads.shutdown(wait=True, cancel_futures=True)
        for job in self.list():
            if job.job_id in self._left or self._is_kept(job.job_id):
                self._leave(job)
            else:
                self._finish(job.job_id, JobState.CANCELLED)
        with self._changed:
            self._changed.notify_all()

    def create(self, kind: str, work: Work, request: object = None) -> Job:
        """Queue work and return at once.

        With a `request`, a dataclass, the job goes on after a restart; and if one of an equal
        request was left unfinished by an earlier process, it is that one that goes on. If one
        failed, the new job has what that one kept.

        Raises:
            QueueFullError: too many jobs wait already.
            StorageFullError: the request cannot be kept.

        """
        plain = None if request is None else schema.encode(request)
        with self._changed:
            found = self._find_left(kind, plain)
            if found and self._go_on(found):
                return self._jobs[found]
            num_waiting = sum(
                job.state is JobState.QUEUED and job.job_id not in self._left
                for job in self._jobs.values()
            )
            if num_waiting >= self.max_queued:
                raise QueueFullError(f"{num_waiting} jobs wait already; try again later")
            job = Job(
                job_id=f"{kind}-{uuid.uuid4().hex[:12]}",
                kind=kind,
                state=JobState.QUEUED,
                created_at=_now(),
            )
            self._folder.claim(job.job_id)
            if plain is not None:
                self._folder.save_request(job.job_id, StoredRequest(request=plain))
                self._take_from_failed(job, plain)
                self._resumable.add(job.job_id)
            self._put(job)
            self._submit(job, work)
        return job

    def get(self, job_id: str) -> Job:
        """Return the job's present state.

        Raises:
            UnknownJobError: no such job.

        """
        with self._changed:
            return UnknownJobError.look_up(job_id, self._jobs)

    def list(self) -> tuple[Job, ...]:
        """Return all jobs, newest first."""
        with self._changed:
            return tuple(sorted(self._jobs.values(), key=lambda j: j.created_at, reverse=True))

    def watch(self, job_id: str) -> Iterator[Job]:
        """Yield the job now and after every change until it is final.

        One that an earlier process left unfinished goes on.

        Raises:
            UnknownJobError: no such job.
            ServiceUnavailableError: the service ends, and the job goes on when it starts again.

        """
        self._go_on_if_left(job_id)
        current = self.get(job_id)
        yield current
        while not current.state.is_final:
            current = self._wait_for_change(current)
            yield current

    def follow(self, job_id: str, name: str, first: int = 0) -> WakingWatch[Any]:
        """Yield what a job published under a name, from the `first` item on, until it is final.

        Also what it published before, in earlier processes too: who comes back with the number of
        the items it has misses none. Closing it, from any thread, ends it at once.

        Raises:
            as `watch`, with the first item.

        """
        is_closed = threading.Event()

        def close() -> None:
            is_closed.set()
            with self._changed:
                self._changed.notify_all()

        return WakingWatch(self._follow(job_id, name, first, is_closed), close)

    def _follow(
        self, job_id: str, name: str, first: int, is_closed: threading.Event
    ) -> Iterator[Any]:
        self._go_on_if_left(job_id)
        self.get(job_id)
        path = self._folder.items_file(job_id, name)
        number = max(first, 0)
        while not is_closed.is_set():
            with self._changed:
                is_final = self.get(job_id).state.is_final
                num_published = self._num_published[job_id]
            for item in read_items(path, number):
                yield item
                number += 1
            if is_final:
                return
            self._wait_for_more(job_id, num_published, is_closed)

    def cancel(self, job_id: str) -> Job:
        """Ask a job to stop; one that still waits is cancelled at once."""
        job = self.get(job_id)
        if job.state.is_final or (job_id in self._left and not self._folder.claim(job_id)):
            return job
        with self._changed:
            self._left.discard(job_id)
            self._unwanted.add(job_id)
            self._cancelled.setdefault(job_id, threading.Event()).set()
        if job.state is JobState.QUEUED:
            self._finish(job_id, JobState.CANCELLED)
        return self.get(job_id)

    def result(self, job_id: str, cls: type[T]) -> T:
        """Return the result of a finished job.

        Raises:
            JobNotFinishedError: it has none yet.
            CancelledJobError: it was cancelled.
            ForetokenError: it failed; the job's own error.

        """
        self._check_succeeded(job_id)
        return schema.decode(cls, self._folder.load_result(job_id))

    def attachment(self, job_id: str, name: str) -> Path:
        """Return the path of a file that a finished job has attached.

        Raises:
            JobNotFinishedError, CancelledJobError, ForetokenError: as `result`.
            InvalidRequestError: it attached no such file.

        """
        self._check_succeeded(job_id)
        path = self._folder.attachment(job_id, name)
        if not path.is_file():
            raise InvalidRequestError.of_field("job_id", f"job {job_id} kept no {name}")
        return path

    def _check_succeeded(self, job_id: str) -> None:
        job = self.get(job_id)
        if job.state is JobState.CANCELLED:
            raise CancelledJobError(f"job {job_id} was cancelled")
        if job.state is JobState.FAILED:
            raise error_of_job(job)
        if job.state is not JobState.SUCCEEDED:
            raise JobNotFinishedError(f"job {job_id} is {job.state.name.lower()}")

    def _take_over(self, job: Job) -> None:
        """Keep a job that another process left, as it was; it waits."""
        # What the other process wrote last may be younger than what was loaded.
        job = self._folder.load_job(job.job_id) or job
        if not job.state.is_final:
            job = dataclasses.replace(job, state=JobState.QUEUED, message="interrupted")
            self._resumable.add(job.job_id)
            self._left.add(job.job_id)
        self._jobs[job.job_id] = job

    def _find_left(self, kind: str, plain: Any) -> str | None:
        if plain is None:
            return None
        for job_id in sorted(self._left):
            stored = self._folder.load_request(job_id)
            if self._jobs[job_id].kind == kind and stored and stored.request == plain:
                return job_id
        return None

    def _take_from_failed(self, job: Job, plain: Any) -> None:
        """Let a new job have what an equal one kept before it failed."""
        for other in list(self._jobs.values()):
            if other.kind == job.kind and other.state is JobState.FAILED:
                stored = self._folder.load_request(other.job_id)
                if stored is not None and stored.request == plain:
                    self._folder.hand_on(other.job_id, job.job_id)

    def _go_on_if_left(self, job_id: str) -> None:
        with self._changed:
            if job_id in self._left and not self._go_on(job_id) and job_id in self._left:
                raise ServiceUnavailableError(
                    f"another process runs job {job_id}; ask it, or look again when it has ended"
                )

    def _go_on(self, job_id: str) -> bool:
        """Begin a job that was left anew; not where another process has taken it meanwhile."""
        job, stored = self._jobs[job_id], self._folder.load_request(job_id)
        if job_id not in self._left or stored is None or not self._folder.claim(job_id):
            return False
        self._left.discard(job_id)
        if stored.num_starts >= _MAX_STARTS:
            self._fail_interrupted(job, f"the service stopped {stored.num_starts} times in it")
            return False
        try:
            work = self._handlers[job.kind](stored.request)
            stored = dataclasses.replace(stored, num_starts=stored.num_starts + 1)
            self._folder.save_request(job_id, stored)
        except ForetokenError as err:
            self._finish(job_id, JobState.FAILED, err.reason, err.message)
            return False
        _log.info("job goes on job_id=%s progress_ratio=%.2f", job_id, job.progress_ratio)
        self._folder.save_job(job)
        self._submit(job, work)
        return True

    def _fail_interrupted(self, job: Job, why: str) -> None:
        self._jobs[job.job_id] = job
        message = f"{why}; create it again"
        self._finish(job.job_id, JobState.FAILED, InterruptedJobError.reason, message)

    def _submit(self, job: Job, work: Work) -> None:
        self._cancelled[job.job_id] = threading.Event()
        threads = self._threads_by_kind.get(job.kind, self._threads)
        # It works for the request that asked for it.
        threads.submit(self._run, job, work, trace.current())

    def _is_kept(self, job_id: str) -> bool:
        """Whether a job that stops now, stops because the service does, and goes on with it."""
        is_asked = self._is_closing and job_id not in self._unwanted
        return is_asked and job_id in self._resumable and not self.get(job_id).state.is_final

    def _leave(self, job: Job) -> None:
        """Let the next process go on with a job: this one ended as it should, which is no start."""
        stored = self._folder.load_request(job.job_id)
        if stored is not None and job.job_id not in self._left:
            self._folder.save_job(job)
            self._folder.save_request(job.job_id, dataclasses.replace(stored, num_starts=0))
        self._folder.let_go(job.job_id)

    def _wait_for_change(self, seen: Job) -> Job:
        with self._changed:
            self._changed.wait_for(
                lambda: self._jobs[seen.job_id] != seen or self._is_kept(seen.job_id)
            )
            current = self._jobs[seen.job_id]
            if current == seen:
                raise _ends(seen.job_id)
            return current

    def _wait_for_more(self, job_id: str, num_seen: int, is_closed: threading.Event) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    is_closed.is_set()
                    or self._num_published[job_id] > num_seen
                    or self._jobs[job_id].state.is_final
                    or self._is_kept(job_id)
                )
            )
            is_nothing_new = self._num_published[job_id] == num_seen and not is_closed.is_set()
            if is_nothing_new and self._is_kept(job_id):
                raise _ends(job_id)

    def _run(self, job: Job, work: Work, request: trace.TraceContext | None) -> None:
        job_id = job.job_id
        if self._cancelled[job_id].is_set():
            self._stop(job_id)
            return
        self._update(job_id, state=JobState.RUNNING)

        def report(ratio: float, message: str) -> None:
            self._update(job_id, progress_ratio=ratio, message=message)

        def publish(name: str, key: str, item: Any) -> None:
            self._publish(job_id, name, key, item)

        def tell(notice: str) -> None:
            known = self.get(job_id).notices
            if notice not in known:
                self._update(job_id, notices=(*known, notice)[-_MAX_NOTICES:])

        event, folder = self._cancelled[job_id], self._folder.path
        try:
            progress = JobProgress(report, event, job_id, folder, publish, tell)
            with (
                progress.of_this_thread(),
                trace.entered(request),
                trace.span(f"job {job.kind}", {"foretoken.job_id": job_id}),
            ):
                outcome = work(progress)
            self._folder.save_result(job_id, outcome)
        except CancelledJobError:
            self._stop(job_id)
        except ForetokenError as err:
            self._finish(job_id, JobState.FAILED, err.reason, err.message)
        except Exception as err:  # noqa: BLE001
            # The boundary of the thread: whatever a job raises must reach whoever watches it.
            with trace.entered(request):
                _log.exception("job %s failed", job_id)
            self._finish(job_id, JobState.FAILED, "INTERNAL", f"{type(err).__name__}: {err}")
        else:
            self._finish(job_id, JobState.SUCCEEDED)
            self._on_success(self.get(job_id))

    def _publish(self, job_id: str, name: str, key: str, item: Any) -> None:
        with self._changed:
            if (job_id, name) not in self._items:
                self._items[job_id, name] = ItemFile(self._folder.items_file(job_id, name))
            if self._items[job_id, name].append(key, item):
                self._num_published[job_id] += 1
                self._changed.notify_all()

    def _stop(self, job_id: str) -> None:
        if not self._is_kept(job_id):
            self._finish(job_id, JobState.CANCELLED)

    def _finish(self, job_id: str, state: JobState, reason: str = "", message: str = "") -> None:
        # Whoever learns of the end finds the files tidied.
        with self._changed:
            if self.get(job_id).state.is_final:
                return
            ratio = 1.0 if state is JobState.SUCCEEDED else self.get(job_id).progress_ratio
            self._update(
                job_id,
                state=state,
                progress_ratio=ratio,
                finished_at=_now(),
                error_reason=reason,
                error_message=message,
            )
            self._resumable.discard(job_id)
            # What a failed job found serves the next one with the same request.
            if state is JobState.FAILED and self._folder.has_kept(job_id):
                self._folder.let_go(job_id)
            else:
                self._folder.tidy(job_id)

    def _update(self, job_id: str, **changes: Any) -> None:
        with self._changed:
            job = self._jobs[job_id]
            if job_id in self._resumable and "progress_ratio" in changes:
                # One that goes on passes again what it had passed.
                changes["progress_ratio"] = max(changes["progress_ratio"], job.progress_ratio)
            if not job.state.is_final:
                self._put(dataclasses.replace(job, **changes))

    def _put(self, job: Job) -> None:
        with self._changed:
            previous = self._jobs.get(job.job_id)
            self._jobs[job.job_id] = job
            if (
                previous is None
                or previous.state is not job.state
                or self._must_save(previous, job)
            ):
                self._folder.save_job(job)
            self._changed.notify_all()

    def _must_save(self, previous: Job, job: Job) -> bool:
        """Whether the progress of a job that can go on is worth a file: each percent."""
        is_further = int(100 * job.progress_ratio) > int(100 * previous.progress_ratio)
        return is_further and job.job_id in self._resumable


def _ends(job_id: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"the service ends; job {job_id} goes on when it has started again", job_id=job_id
    )


def _now() -> str:
    return datetime.now(tz=UTC).isoformat(timespec="milliseconds")
