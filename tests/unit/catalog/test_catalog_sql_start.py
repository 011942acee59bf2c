"""A question whose process is never ready ends all the same, and takes the process with it."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.sql.answer import Answer
from foretoken.catalog.sql.frame import Setup
from foretoken.catalog.sql.process import SqlProcess, SqlProcesses
from foretoken.catalog.storage.store import Store
from foretoken.domain.errors import CatalogBusyError, ForetokenError, ServiceUnavailableError


class _Stopped(SqlProcesses):
    """Processes of which each stands still before it is ready."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        super().__init__(setup, folder)
        self.taken: list[SqlProcess] = []

    def take(self) -> SqlProcess:
        process = super().take()
        os.kill(process.pid, signal.SIGSTOP)
        self.taken.append(process)
        return process


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[_Stopped]:
    setup = Setup(
        path=str(tmp_path / "catalog.duckdb"),
        lake=None,
        views={},
        num_threads=1,
        memory_bytes=2**28,
        spill_folder="",
        max_spill_bytes=2**20,
        max_rows=1,
        max_result_bytes=2**20,
    )
    processes = _Stopped(setup, tmp_path)
    yield processes
    processes.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(CatalogConfig(path=str(tmp_path / "catalog.duckdb")))


def test_it_waits_so_long_and_says_so(processes: _Stopped, store: Store) -> None:
    ended: SimpleQueue[str] = SimpleQueue()
    answer = Answer(store, processes, ended.put, start_limit_s=0.1)
    with pytest.raises(CatalogBusyError, match=r"no process for the query in 0\.1 s"):
        answer.start("SELECT 1", 0, 3600.0)
    assert "" == ended.get(timeout=60.0)
    assert [False] == [process.is_alive for process in processes.taken]


@pytest.mark.parametrize("is_earlier", [False, True])
def test_it_ends_with_its_caller(*, is_earlier: bool, processes: _Stopped, store: Store) -> None:
    """Who leaves while the process starts waits for it no more."""
    answer = Answer(store, processes, lambda _: None)
    leaving = threading.Timer(0.1, answer.cancel)
    if is_earlier:
        answer.cancel()
    else:
        leaving.start()
    with pytest.raises(ServiceUnavailableError, match="its caller left"):
        answer.start("SELECT 1", 0, 3600.0)
    leaving.cancel()


def test_it_ends_with_its_process(processes: _Stopped, store: Store) -> None:
    """What ends a process before it is ready ends the question."""
    answer = Answer(store, processes, lambda _: None)
    killing = threading.Timer(0.1, lambda: os.kill(processes.taken[0].pid, signal.SIGKILL))
    killing.start()
    with pytest.raises(ForetokenError, match="ended by the system"):
        answer.start("SELECT 1", 0, 3600.0)
    killing.join()
