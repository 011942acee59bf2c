"""Work of a job that stands still where a test wants it to."""

import threading

from foretoken.jobs.runner import JobProgress


def pause(progress: JobProgress, may_go_on: threading.Event) -> None:
    """Wait until the work may go on.

    Raises:
        CancelledJobError: the job was cancelled before.

    """
    is_free = False
    while not is_free:
        is_free = may_go_on.wait(0.01)
        progress.check()
