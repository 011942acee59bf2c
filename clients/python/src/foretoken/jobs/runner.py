"""Run jobs in threads and keep their states and results in a folder.

A job that was running when its process died is found failed, reason INTERRUPTED; one that was
created with its request goes on, under the same name, where its kind has a handler. Jobs that
processes share go on in whichever of them has a thread free; the folder has copies of their files.
"""

import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from foretoken.domain import schema
from foretoken.domain.caller import current_caller
from foretoken.domain.errors import (
    CancelledJobError,
    ForetokenError,
    InterruptedJobError,
    InvalidRequestError,
    QueueFullError,
    QuotaError,
    ServiceUnavailableError,
)
from foretoken.domain.job import Job, JobState, WakingWatch
from foretoken.jobs.board import JobBoard
from foretoken.jobs.folder import LIST_SUFFIX, JobFolder, StoredRequest
from foretoken.jobs.job_threads import JobThreads
from foretoken.jobs.patience import do_patiently
from foretoken.jobs.progress import JobProgress
from foretoken.jobs.reading import WITHOUT_RESULT, ReadsJobs
from foretoken.jobs.sharing import JobListener, SharedJobs, interrupted
from foretoken.jobs.taking import MAX_STARTS, JobTaking, Resume, RunnerSteps, Work
from foretoken.wire import trace

__all__ = ["JobLimits", "JobProgress", "JobRunner", "Resume", "Work"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

# More are no news: every state of a job that is watched has them all.
_MAX_NOTICES = 100


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobLimits:
    """How many jobs may wait, and how many of one caller may not have ended (0: any number).

    One that can go on waits `first_retry_s` for a service that is away, and then longer.
    """

    max_queued: int = 64
    max_per_caller: int = 0
    first_retry_s: float = 1.0


_LIMITS = JobLimits()


class JobRunner(ReadsJobs):
    """Queue of jobs over a few threads. The work returns the dataclass that is its result.

    `num_workers` jobs run at once; a kind named in `num_workers_by_kind` has so many threads of its
    own, so that neither waits for the other.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_workers: int = 1,
        limits: JobLimits = _LIMITS,
        num_workers_by_kind: Mapping[str, int] | None = None,
        on_success: Callable[[Job], None] = lambda _: None,
        sharing: SharedJobs | None = None,
    ) -> None:
        """Keep job files under `folder`; call `open` before use.

        `on_success` is given every job that has just succeeded, in the thread that ran it. With
        `sharing` the jobs are those of all processes of the service.
        """
        kept = JobFolder(folder)
        super().__init__(kept, JobBoard(kept, self._is_kept), sharing)
        self._limits = limits
        self._on_success = on_success
        self._changed = self._board.changed
        self._cancelled: dict[str, threading.Event] = {}
        self._threads = JobThreads(num_workers, "job")
        self._threads_by_kind = {
            kind: JobThreads(number, kind) for kind, number in (num_workers_by_kind or {}).items()
        }
        self._handlers: Mapping[str, Resume] = {}
        # Jobs with a request: those that run here, and those that were left and go on when asked.
        self._resumable: set[str] = set()
        self._left: set[str] = set()
        self._unwanted: set[str] = set()
        self._is_closing = False

    @property
    def max_queued(self) -> int:
        """Jobs that may wait; more are refused."""
        return self._limits.max_queued

    def open(self, handlers: Mapping[str, Resume] | None = None, *, resumes: bool = True) -> None:
        """Load the jobs of earlier processes; those that never ended go on, or are failed.

        A job goes on if it was created with its request and `handlers` knows its kind: now, or
        without `resumes` as soon as it is created again or watched. One that another process runs
        is left to that.

        Raises:
            InvalidRequestError: the folder cannot be made.

        """
        self._handlers = handlers or {}
        if self._sharing is not None:
            self._folder.open_alone()
            self._taking = self._new_taking(self._sharing)
            self._sharing.open(
                self._folder,
                JobListener(
                    get=self._board.get,
                    see=self._taking.see,
                    lose=lambda job_id: self._interrupt(job_id, is_unwanted=False),
                ),
            )
            return
        self._folder.open()
        for job in self._folder.load_jobs():
            if job.state.is_final:
                self._board.put(job)
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

        Jobs with a request stay as they are for the next process, shared ones for the others; the
        rest is cancelled.
        """
        with self._changed:
            self._is_closing = True
        if self._sharing is not None:
            self._sharing.stop_waiting()
        for event in list(self._cancelled.values()):
            event.set()
        for threads in (self._threads, *self._threads_by_kind.values()):
            threads.close()
        for job in self._board.list():
            if self._sharing is not None:
                self._sharing.release(interrupted(job))
            elif job.job_id in self._left or self._is_kept(job.job_id):
                self._leave(job)
            else:
                self._finish(job.job_id, JobState.CANCELLED)
        if self._sharing is not None:
            self._sharing.close()
            self._folder.let_go_alone()
        self._board.wake()

    def create(self, kind: str, work: Work, request: object = None, title: str = "") -> Job:
        """Queue work and return at once; `title` says what it is about.

        With a `request`, a dataclass, the job goes on after a restart; and if one of an equal
        request was left unfinished by an earlier process, it is that one that goes on. If one
        failed or was cancelled, the new job has what that one kept.

        Raises:
            QueueFullError: too many jobs wait already.
            QuotaError: the caller has as many jobs as it may have.
            StorageFullError: the request cannot be kept.

        """
        plain = None if request is None else schema.encode(request)
        with self._changed:
            found = self._find_left(kind, plain)
            if found and self._go_on(found):
                return self._board.get(found)
            num_waiting = sum(
                job.state is JobState.QUEUED and job.job_id not in self._left
                for job in self._board.list()
            )
            if num_waiting >= self._limits.max_queued:
                raise QueueFullError(f"{num_waiting} jobs wait already; try again later")
            job = Job(
                job_id=f"{kind}-{uuid.uuid4().hex[:12]}",
                kind=kind,
                state=JobState.QUEUED,
                created_at=_now(),
                owner=current_caller(),
                title=title,
            )
            self._check_quota(job.owner)
            if self._sharing is None:
                self._folder.claim(job.job_id)
            if plain is not None:
                self._folder.save_request(job.job_id, StoredRequest(request=plain))
                self._take_from_ended(job, plain)
                self._resumable.add(job.job_id)
            if self._sharing is None:
                self._board.put(job)
                self._folder.save_job(job)
                self._submit(job, lambda: self._run(job.job_id, work))
        if self._sharing is not None:
            self._sharing.create(job, plain)
            self._board.put(job)
            self._taking.take(job, work)
        return job

    def watch(self, job_id: str) -> Iterator[Job]:
        """Yield the job now and after every change until it is final.

        One that an earlier process left unfinished goes on.

        Raises:
            UnknownJobError: no such job.
            ServiceUnavailableError: the service ends, and the job goes on when it starts again, or
                in another process.

        """
        self._go_on_if_left(job_id)
        self.get(job_id)
        yield from self._board.watch(job_id)

    def follow(self, job_id: str, name: str, first: int = 0) -> WakingWatch[Any]:
        """Yield what a job published under a name, from the `first` item on, until it is final.

        Also what it published before, in other processes too: who comes back with the number of
        the items it has misses none. Closing it, from any thread, ends it at once.

        Raises:
            as `watch`, with the first item.

        """

        def begin() -> None:
            self._go_on_if_left(job_id)
            self.get(job_id)
            self._fetch(job_id, f"{name}{LIST_SUFFIX}")

        return self._board.follow(job_id, name, first, begin)

    def cancel(self, job_id: str) -> Job:
        """Ask a job to stop; one that still waits is cancelled at once."""
        job = self.get(job_id)
        if job.state.is_final or (job_id in self._left and not self._folder.claim(job_id)):
            return job
        if self._sharing is not None:
            self._taking.see(self._sharing.want_no_more(job_id))
            return self.get(job_id)
        with self._changed:
            self._left.discard(job_id)
            self._unwanted.add(job_id)
            self._cancelled.setdefault(job_id, threading.Event()).set()
        if job.state is JobState.QUEUED:
            self._finish(job_id, JobState.CANCELLED)
        return self.get(job_id)

    def is_unwanted(self, job_id: str) -> bool:
        """Whether a job that is to stop was cancelled, by whatever process, not left to others."""
        if self._sharing is not None:
            with suppress(ForetokenError):
                self._sharing.look()
        return job_id in self._unwanted

    def _take_over(self, job: Job) -> None:
        """Keep a job that another process left, as it was; it waits."""
        # What the other process wrote last may be younger than what was loaded.
        job = self._folder.load_job(job.job_id) or job
        if not job.state.is_final:
            job = dataclasses.replace(job, state=JobState.QUEUED, message="interrupted")
            self._resumable.add(job.job_id)
            self._left.add(job.job_id)
        self._board.put(job)

    def _find_left(self, kind: str, plain: Any) -> str | None:
        if plain is None:
            return None
        for job_id in sorted(self._left):
            stored = self._folder.load_request(job_id)
            if self._board.get(job_id).kind == kind and stored and stored.request == plain:
                return job_id
        return None

    def _take_from_ended(self, job: Job, plain: Any) -> None:
        """Let a new job have what an equal one kept before it failed or was cancelled."""
        for other in self._board.list():
            if other.kind == job.kind and other.state in WITHOUT_RESULT:
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
        job, stored = self._board.get(job_id), self._folder.load_request(job_id)
        if job_id not in self._left or stored is None or not self._folder.claim(job_id):
            return False
        self._left.discard(job_id)
        if stored.num_starts >= MAX_STARTS:
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
        self._submit(job, lambda: self._run(job_id, work))
        return True

    def _fail_interrupted(self, job: Job, why: str) -> None:
        self._board.put(job)
        message = f"{why}; create it again"
        self._finish(job.job_id, JobState.FAILED, InterruptedJobError.reason, message)

    def _check_quota(self, owner: str) -> None:
        num_owned = sum(job.owner == owner and not job.state.is_final for job in self._board.list())
        if owner and 0 < self._limits.max_per_caller <= num_owned:
            raise QuotaError(
                f"{owner} has {num_owned} jobs that have not ended, which is all it may have; wait"
                " for one, or cancel it",
                caller=owner,
            )

    def _new_taking(self, sharing: SharedJobs) -> JobTaking:
        def begin(job_id: str, work: Work) -> None:
            self._resumable.add(job_id)
            self._run(job_id, work)

        steps = RunnerSteps(
            submit=self._submit,
            begin=begin,
            stop=lambda job_id: self._interrupt(job_id, is_unwanted=True),
            finish=self._finish,
            give_up=self._fail_interrupted,
            find_resume=self._handlers.get,
            is_closing=lambda: self._is_closing,
        )
        return JobTaking(sharing, self._board, steps)

    def _submit(self, job: Job, task: Callable[[], None]) -> None:
        self._cancelled[job.job_id] = threading.Event()
        # It works for the request that asked for it.
        request = trace.current()

        def work() -> None:
            with trace.entered(request):
                task()

        self._threads_by_kind.get(job.kind, self._threads).submit(job.owner, work)

    def _interrupt(self, job_id: str, *, is_unwanted: bool) -> None:
        """Stop work that nobody wants, or that another process has taken over."""
        with self._changed:
            if is_unwanted:
                self._unwanted.add(job_id)
            self._cancelled.setdefault(job_id, threading.Event()).set()

    def _is_kept(self, job_id: str) -> bool:
        """Whether a job that stops now, stops because the service does, and goes on with it."""
        if not self._is_closing or self._board.get(job_id).state.is_final:
            return False
        if self._sharing is not None:
            return True
        return job_id in self._resumable and job_id not in self._unwanted

    def _leave(self, job: Job) -> None:
        """Let the next process go on with a job: this one ended as it should, which is no start."""
        stored = self._folder.load_request(job.job_id)
        if stored is not None and job.job_id not in self._left:
            self._folder.save_job(job)
            self._folder.save_request(job.job_id, dataclasses.replace(stored, num_starts=0))
        self._folder.let_go(job.job_id)

    def _run(self, job_id: str, work: Work) -> None:
        if self._cancelled[job_id].is_set():
            self._stop(job_id)
            return
        self._update(job_id, state=JobState.RUNNING)
        progress, kind = self._new_progress(job_id), self._board.get(job_id).kind
        try:
            attributes = {"foretoken.job_id": job_id}
            with progress.of_this_thread(), trace.span(f"job {kind}", attributes):
                outcome = self._do(job_id, work, progress)
            self._folder.save_result(job_id, outcome)
        except CancelledJobError:
            self._stop(job_id)
        except ForetokenError as err:
            self._finish(job_id, JobState.FAILED, err.reason, err.message)
        except MemoryError as err:
            _log.warning("job %s: %s", job_id, err)
            problem = f"this takes more memory than there is; ask for less of it at once ({err})"
            self._finish(job_id, JobState.FAILED, InvalidRequestError.reason, problem)
        except Exception as err:  # noqa: BLE001
            # The boundary of the thread: whatever a job raises must reach whoever watches it.
            _log.exception("job %s failed", job_id)
            self._finish(job_id, JobState.FAILED, "INTERNAL", f"{type(err).__name__}: {err}")
        else:
            if self._finish(job_id, JobState.SUCCEEDED):
                self._on_success(self._board.get(job_id))

    def _do(self, job_id: str, work: Work, progress: JobProgress) -> object:
        if job_id not in self._resumable:
            return work(progress)
        return do_patiently(work, progress, self._limits.first_retry_s)

    def _new_progress(self, job_id: str) -> JobProgress:
        def report(ratio: float, message: str) -> None:
            self._update(job_id, progress_ratio=ratio, message=message)

        def publish(name: str, key: str, item: Any) -> None:
            self._publish(job_id, name, key, item)

        def tell(notice: str) -> None:
            known = self._board.get(job_id).notices
            if notice not in known:
                self._update(job_id, notices=(*known, notice)[-_MAX_NOTICES:])

        event, folder = self._cancelled[job_id], self._folder.path
        return JobProgress(report, event, job_id, folder, publish, tell)

    def _publish(self, job_id: str, name: str, key: str, item: Any) -> None:
        self._board.publish(job_id, name, key, item)
        if self._sharing is not None:
            self._sharing.touch(job_id)

    def _stop(self, job_id: str) -> None:
        is_lost = self._sharing is not None and not self._sharing.holds(job_id)
        if not (is_lost or self._is_kept(job_id)):
            self._finish(job_id, JobState.CANCELLED)

    def _finish(self, job_id: str, state: JobState, reason: str = "", message: str = "") -> bool:
        """End a job, and return whether it is this one that ended it."""
        job = self._board.get(job_id)
        ended = dataclasses.replace(
            job,
            state=state,
            progress_ratio=1.0 if state is JobState.SUCCEEDED else job.progress_ratio,
            finished_at=_now(),
            error_reason=reason,
            error_message=message,
        )
        if self._sharing is not None and not self._sharing.finish(ended):
            return False
        # Whoever learns of the end finds the files tidied.
        with self._changed:
            if self._board.get(job_id).state.is_final:
                return False
            self._folder.save_job(ended)
            self._board.put(ended)
            self._resumable.discard(job_id)
            # Its request, and what it found, serve the next one with the same request.
            if state in WITHOUT_RESULT and self._folder.load_request(job_id):
                self._folder.let_go(job_id)
            else:
                self._folder.tidy(job_id)
        return True

    def _update(self, job_id: str, **changes: Any) -> None:
        with self._changed:
            job = self._board.get(job_id)
            if job_id in self._resumable and "progress_ratio" in changes:
                # One that goes on passes again what it had passed.
                changes["progress_ratio"] = max(changes["progress_ratio"], job.progress_ratio)
            before, after = self._board.change(job_id, **changes)
            if self._sharing is not None:
                self._sharing.touch(job_id)
            elif before.state is not after.state or self._must_save(before, after):
                self._folder.save_job(after)

    def _must_save(self, previous: Job, job: Job) -> bool:
        """Whether the progress of a job that can go on is worth a file: each percent."""
        is_further = int(100 * job.progress_ratio) > int(100 * previous.progress_ratio)
        return is_further and job.job_id in self._resumable


def _now() -> str:
    return datetime.now(tz=UTC).isoformat(timespec="milliseconds")
