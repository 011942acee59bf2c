"""What the work of a job is given: a way to tell how far it is, and places for its files."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from foretoken.domain.errors import CancelledJobError
from foretoken.jobs.folder import JobFolder, storage_full


def _show_nobody(_name: str, _key: str, _item: Any) -> None:
    pass


def _tell_nobody(_notice: str) -> None:
    pass


class JobProgress:
    """Given to the work of a job: tells how far it is, and learns that it was cancelled.

    `job_id` names the job; files it attaches are kept with its result. `tell` adds a line to the
    notices, which no later message replaces.
    """

    def __init__(
        self,
        report: Callable[[float, str], None],
        cancelled: threading.Event,
        job_id: str = "",
        folder: Path = Path(),
        publish: Callable[[str, str, Any], None] = _show_nobody,
        tell: Callable[[str], None] = _tell_nobody,
    ) -> None:
        """Connect to the runner."""
        self._report = report
        self._cancelled = cancelled
        self._folder = JobFolder(folder)
        self._publish = publish
        self.tell = tell
        self._ratio = 0.0
        self.job_id = job_id

    def update(self, ratio: float, message: str = "") -> None:
        """Publish progress between 0 and 1.

        Raises:
            CancelledJobError: the job was cancelled; let it pass.

        """
        self.check()
        self._ratio = min(max(ratio, 0.0), 1.0)
        self._report(self._ratio, message)

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Let what runs in this thread meanwhile tell by `tell_job` what it does."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def note(self, message: str) -> None:
        """Publish what is under way, no further than before.

        Raises:
            CancelledJobError: the job was cancelled; let it pass.

        """
        self.update(self._ratio, message)

    def wait(self, delay_s: float, message: str) -> None:
        """Publish what is waited for, and wait so many seconds.

        Raises:
            CancelledJobError: the job was cancelled; let it pass.

        """
        self.note(message)
        self._cancelled.wait(delay_s)
        self.check()

    def check(self) -> None:
        """Do nothing while the job is wanted.

        Raises:
            CancelledJobError: the job was cancelled; let it pass.

        """
        if self._cancelled.is_set():
            raise CancelledJobError("the job was cancelled")

    def publish(self, name: str, key: str, item: Any) -> None:
        """Append plain data to the job's list of that name, which others may follow.

        An item whose key is in the list already is left out: a job that goes on after a restart may
        publish all again.

        Raises:
            StorageFullError: it cannot be written.

        """
        self._publish(name, key, item)

    def kept_path(self, name: str) -> Path:
        """Return the path of a file that stays, also through a restart, until the job ends."""
        return self._folder.kept_file(self.job_id, name)

    @contextmanager
    def attach(self, name: str) -> Iterator[Path]:
        """Give the path to write a file to; it is the job's `name` when the block ends well.

        Raises:
            StorageFullError: it cannot be written.

        """
        path = self._folder.attachment(self.job_id, name)
        temporary = path.with_suffix(".tmp")
        try:
            yield temporary
            temporary.replace(path)
        except OSError as err:
            raise storage_full(self._folder.path, err) from err
        finally:
            temporary.unlink(missing_ok=True)


_CURRENT: ContextVar[JobProgress | None] = ContextVar("job of this thread", default=None)


def tell_job(message: str) -> None:
    """Publish what is under way in the job that this thread works for, if it works for any.

    Raises:
        CancelledJobError: the job was cancelled; let it pass.

    """
    progress = _CURRENT.get()
    if progress is not None:
        progress.note(message)
