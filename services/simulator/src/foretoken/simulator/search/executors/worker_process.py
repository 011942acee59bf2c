"""The parent's end of a worker process."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any, Self, cast

from foretoken.simulator.search.executors.outcome import Outcome
from foretoken.simulator.search.executors.worker import FORGET, START, TASK

# Workers are as many as the machine has cores: none of them needs threads.
_ONE_THREAD: Mapping[str, str] = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


class WorkerDiedError(Exception):
    """A worker process ended; the message says how."""


class WorkerProcess:
    """A process that does one task at a time, of any of the runs that were started in it."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._tasks = cast("IO[bytes]", process.stdin)
        self._answers = cast("IO[bytes]", process.stdout)
        self.runs: set[int] = set()

    @classmethod
    def start(cls) -> Self:
        """Start a worker that finds the modules this process finds.

        Raises:
            WorkerDiedError: no process can be started.

        """
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
        command = [sys.executable, "-m", "foretoken.simulator.search.executors.worker"]
        try:
            process = subprocess.Popen(  # noqa: S603 - our own program
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": path},
            )
        except OSError as err:
            raise WorkerDiedError(f"cannot be started: {err.strerror}") from err
        return cls(process)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def begin(self, run: int, content: bytes) -> None:
        """Give the pickled function and shared data of a run.

        Raises:
            WorkerDiedError: the process has ended.

        """
        self._tell(START, run, content)
        self.runs.add(run)

    def forget(self, run: int) -> None:
        """Drop what a run shared.

        Raises:
            WorkerDiedError: the process has ended.

        """
        self._tell(FORGET, run)
        self.runs.discard(run)

    def do(self, run: int, item: bytes) -> Outcome:
        """Return what comes of an item; waits for it.

        Raises:
            WorkerDiedError: the process has ended.

        """
        self._tell(TASK, run, item)
        try:
            return cast("Outcome", pickle.load(self._answers))  # noqa: S301 - our own worker's
        except (EOFError, OSError, pickle.UnpicklingError) as err:
            raise WorkerDiedError(self._ending()) from err

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._tasks, self._answers):
            try:
                pipe.close()
            except OSError:  # what was written last had nobody to read it
                continue

    def kill(self) -> None:
        """End the process while another thread waits for its answer."""
        self._process.kill()

    def _tell(self, *message: Any) -> None:
        try:
            pickle.dump(message, self._tasks, pickle.HIGHEST_PROTOCOL)
            self._tasks.flush()
        except OSError as err:
            raise WorkerDiedError(self._ending()) from err

    def _ending(self) -> str:
        status = self._process.wait()
        if status == -signal.SIGKILL:
            return "was killed (signal 9), as the system does when memory runs out"
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
