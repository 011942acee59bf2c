"""Processes that answer questions in SQL: each can be ended in the middle of one."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

from foretoken.catalog.sql.child import EXIT_MEMORY
from foretoken.catalog.sql.frame import Kind, Question, Setup, limit_error, read_frame
from foretoken.domain.errors import CatalogBusyError, ForetokenError

# What folders of processes in the scratch folder are called; only a crash leaves one there.
_FOLDER_PREFIX = "sql_"


class SqlProcess:
    """A process that answers one question after another."""

    def __init__(self, setup: Setup) -> None:
        """Start it: it makes itself ready while others go on.

        Raises:
            CatalogBusyError: the system has no room for another process.

        """
        self._folder = Path(setup.spill_folder)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109
        command = [sys.executable, "-m", "foretoken.catalog.sql.child"]
        try:
            self._folder.mkdir(parents=True)
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        except OSError as err:
            raise CatalogBusyError(f"no process for the query: {err.strerror}; try again") from err
        self._questions = cast("IO[bytes]", self._process.stdin)
        self._answers = cast("IO[bytes]", self._process.stdout)
        self._is_ready = False
        self._tell(setup.to_json())

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait until it can be asked.

        Raises:
            ForetokenError: the process ended before.

        """
        if not self._is_ready:
            self.receive()
            self._is_ready = True

    def ask(self, question: Question) -> None:
        """Ask; `receive` has the answer."""
        self._tell(question.to_json())

    def receive(self) -> tuple[Kind, bytes]:
        """Return the next frame of the answer.

        Raises:
            QueryLimitError: the process took more memory than it may, or crashed.
            ForetokenError: the process ended otherwise.

        """
        try:
            frame = read_frame(self._answers)
        except ValueError:  # closed meanwhile
            frame = None
        if frame is None:
            raise self._explain_end()
        return frame

    def end(self) -> None:
        """End the process, whatever it does, from any thread; what it left on disk goes too."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._questions, self._answers):
            with contextlib.suppress(OSError):  # what was written last had nobody to read it
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, line: str) -> None:
        # A process that is gone by now is found out by `receive`.
        with contextlib.suppress(OSError):
            self._questions.write(line.encode() + b"\n")
            self._questions.flush()

    def _explain_end(self) -> ForetokenError:
        status = self._process.wait()
        if status == EXIT_MEMORY:
            return limit_error("memory", "needs more memory than a query may take")
        if status == -signal.SIGKILL:
            return limit_error("memory", "was ended by the system, as it does where memory is low")
        if status < 0:
            name = signal.Signals(-status).name
            return limit_error("crash", f"crashed the process that answered it ({name})")
        return ForetokenError(f"the process that answers queries ended with status {status}")


class SqlProcesses:
    """Processes for one question each at a time, kept for the next. Safe to use from threads."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        """Keep what to tell each; `folder` is where each gets a folder for what it spills."""
        self._setup = setup
        self._folder = folder
        self._lock = threading.Lock()
        self._idle: list[SqlProcess] = []
        self._is_open = True

    def take(self) -> SqlProcess:
        """Return a process that nobody else has; it may not be ready yet.

        Raises:
            CatalogBusyError: no process can be started.

        """
        return self._take_idle() or self._start()

    def give_back(self, process: SqlProcess) -> None:
        """Keep a process for the next question."""
        with self._lock:
            if self._is_open:
                self._idle.append(process)
                return
        process.end()

    def replace(self, process: SqlProcess) -> None:
        """End a process, and start one in its place if none is left."""
        process.end()
        with self._lock:
            if self._is_open and not self._idle:
                with contextlib.suppress(CatalogBusyError):  # the next question says so
                    self._idle.append(self._start())

    def close(self) -> None:
        """End the processes that nobody has; those in use end when they are given back."""
        with self._lock:
            self._is_open = False
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _take_idle(self) -> SqlProcess | None:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                process.end()
        return None

    def _start(self) -> SqlProcess:
        folder = self._folder / f"{_FOLDER_PREFIX}{uuid.uuid4().hex}"
        return SqlProcess(replace(self._setup, spill_folder=str(folder)))


def delete_leftovers(folder: Path) -> None:
    """Delete what processes left in a folder whose catalog could not end them."""
    for leftover in folder.glob(f"{_FOLDER_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
