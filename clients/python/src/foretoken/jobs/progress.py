"""What the work of a job is given: a way to tell how far it is, and places for its files."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken.domain.errors import CancelledJobError
from foretoken.jobs.folder import JobFolder, storage_full


def _show_nobody(_name: str, _key: str, _item: Any) -> None:
    pass


class JobProgress:
    """Given to the work of a job: tells how far it is, and learns that it was cancelled.

    `job_id` names the job; files it attaches are kept with its result.
    """

    def __init__(
        self,
        report: Callable[[float, str], None],
        cancelled: threading.Event,
        job_id: str = "",
        folder: Path = Path(),
        publish: Callable[[str, str, Any], None] = _show_nobody,
    ) -> None:
        """Connect to the runner."""
        self._report = report
        self._cancelled = cancelled
        self._folder = JobFolder(folder)
        self._publish = publish
        self.job_id = job_id

    def update(self, ratio: float, message: str = "") -> None:
        """Publish progress between 0 and 1.

        Raises:
            CancelledJobError: the job was cancelled; let it pass.

        """
        self.check()
        self._report(min(max(ratio, 0.0), 1.0), message)

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
