"""The states of jobs, and who waits for them to change."""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from foretoken.domain.errors import ServiceUnavailableError, UnknownJobError
from foretoken.domain.job import Job, WakingWatch
from foretoken.jobs.folder import ItemFile, JobFolder, read_items


class JobBoard:
    """Jobs by name; safe to use from several threads.

    `will_end` says of a job that it stays unfinished when this process ends, as it is about to.
    """

    def __init__(self, folder: JobFolder, will_end: Callable[[str], bool]) -> None:
        """Begin without jobs."""
        self.changed = threading.Condition()
        self._folder = folder
        self._will_end = will_end
        self._jobs: dict[str, Job] = {}
        self._items: dict[tuple[str, str], ItemFile] = {}
        self._num_published: Counter[str] = Counter()

    def __contains__(self, job_id: str) -> bool:
        """Whether there is a job of that name."""
        return job_id in self._jobs

    def get(self, job_id: str) -> Job:
        """Return the job's present state.

        Raises:
            UnknownJobError: no such job.

        """
        with self.changed:
            return UnknownJobError.look_up(job_id, self._jobs)

    def list(self) -> tuple[Job, ...]:
        """Return all jobs, newest first."""
        with self.changed:
            return tuple(sorted(self._jobs.values(), key=lambda j: j.created_at, reverse=True))

    def put(self, job: Job) -> None:
        """Show a state."""
        with self.changed:
            self._jobs[job.job_id] = job
            self.changed.notify_all()

    def change(self, job_id: str, **changes: Any) -> tuple[Job, Job]:
        """Change what is shown, unless the job has ended; return what was shown and what is."""
        with self.changed:
            before = self._jobs[job_id]
            after = before if before.state.is_final else dataclasses.replace(before, **changes)
            self.put(after)
            return before, after

    def wake(self, job_id: str = "") -> None:
        """Let those look again who wait for changes, or for more that the job has published."""
        with self.changed:
            if job_id:
                self._num_published[job_id] += 1
            self.changed.notify_all()

    def publish(self, job_id: str, name: str, key: str, item: Any) -> None:
        """Append to a list of a job; as `JobProgress.publish`."""
        with self.changed:
            if (job_id, name) not in self._items:
                self._items[job_id, name] = ItemFile(self._folder.items_file(job_id, name))
            if self._items[job_id, name].append(key, item):
                self.wake(job_id)

    def forget_items(self, job_id: str) -> None:
        """Read the lists of a job again when something is appended: they were replaced."""
        with self.changed:
            for key in [key for key in self._items if key[0] == job_id]:
                del self._items[key]

    def watch(self, job_id: str) -> Iterator[Job]:
        """Yield the job now and after every change until it is final.

        Raises:
            UnknownJobError: no such job.
            ServiceUnavailableError: the service ends, and the job goes on afterwards.

        """
        current = self.get(job_id)
        yield current
        while not current.state.is_final:
            current = self._wait_for_change(current)
            yield current

    def follow(
        self, job_id: str, name: str, first: int, begin: Callable[[], object]
    ) -> WakingWatch[Any]:
        """Yield what a job published under a name, from the `first` item on, until it is final.

        `begin` is called with the first item that is asked for, and before each look for more.
        Closing it, from any thread, ends it at once.

        Raises:
            as `watch`, with the first item.

        """
        is_closed = threading.Event()

        def close() -> None:
            is_closed.set()
            self.wake()

        return WakingWatch(self._follow(job_id, name, max(first, 0), begin, is_closed), close)

    def _follow(
        self,
        job_id: str,
        name: str,
        number: int,
        begin: Callable[[], object],
        is_closed: threading.Event,
    ) -> Iterator[Any]:
        begin()
        while not is_closed.is_set():
            with self.changed:
                is_final = self.get(job_id).state.is_final
                num_published = self._num_published[job_id]
            begin()
            for item in read_items(self._folder.items_file(job_id, name), number):
                yield item
                number += 1
            if is_final:
                return
            self._wait_for_more(job_id, num_published, is_closed)

    def _wait_for_change(self, seen: Job) -> Job:
        with self.changed:
            self.changed.wait_for(
                lambda: self._jobs[seen.job_id] != seen or self._will_end(seen.job_id)
            )
            current = self._jobs[seen.job_id]
            if current == seen:
                raise _ends(seen.job_id)
            return current

    def _wait_for_more(self, job_id: str, num_seen: int, is_closed: threading.Event) -> None:
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    is_closed.is_set()
                    or self._num_published[job_id] > num_seen
                    or self._jobs[job_id].state.is_final
                    or self._will_end(job_id)
                )
            )
            is_nothing_new = self._num_published[job_id] == num_seen and not is_closed.is_set()
            if is_nothing_new and self._will_end(job_id):
                raise _ends(job_id)


def _ends(job_id: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"the service ends; job {job_id} goes on when it has started again", job_id=job_id
    )
