"""Whatever a question takes, it ends, and neither the catalog nor the next query notices."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalog_rows import batches, gemms, run
from sql_runaways import NAMED_RUNAWAYS, RUNAWAYS

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import (
    ForetokenError,
    InvalidRequestError,
    QueryLimitError,
)
from foretoken.domain.measurements.measurement import SqlQuery
from foretoken.domain.ports import CatalogAdminPort
from foretoken.wire.arrow import read_table

_MAX_GROWTH_BYTES = 100 * 2**20
# Of every question; what comes after the deadline below hangs.
_TIMEOUT_S = 1.0
_HANG_S = 120.0
_CONFIG = """
catalog:
  memory_limit: 4GB
  num_threads: 2
"""
_PS = shutil.which("ps") or "ps"
_FOREVER = "SELECT count(*) FROM range(1000000000) AS a, range(1000000000) AS b WHERE a <> b"


def _count(port: CatalogAdminPort) -> int:
    answer = read_table(port.query_sql(SqlQuery(text="SELECT count(*) FROM measurements")))
    return int(answer.column(0)[0].as_py())


def _outcome_of(port: CatalogAdminPort, text: str) -> str:
    """Return how a question ends: with rows, refused, or by which limit."""
    try:
        read_table(port.query_sql(SqlQuery(text=text, timeout_s=_TIMEOUT_S)))
    except QueryLimitError as err:
        return err.details["limit"]
    except InvalidRequestError:
        return "refused"
    return "answered"


@pytest.fixture
def opened(catalog_path: str) -> Iterator[CatalogService]:
    config = CatalogConfig(path=catalog_path, num_threads=1, sql_max_running=2)
    service = CatalogService(config)
    service.open()
    list(service.record(run(), batches(gemms([1, 2, 3]))))
    yield service
    service.close()


@pytest.mark.slow
def test_what_nothing_used_to_end_is_ended(opened: CatalogService) -> None:
    outcomes = {name: _outcome_of(opened, text) for name, text in NAMED_RUNAWAYS.items()}
    assert set(outcomes.values()) <= {"time", "memory", "answered"}
    assert 3 == _count(opened)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text of parentheses", "result of a large row", "nested json"])
def test_what_would_fill_the_catalog_does_not(name: str, opened: CatalogService) -> None:
    assert _outcome_of(opened, RUNAWAYS[name]) in {"refused", "size", "memory", "time"}
    assert 3 == _count(opened)


@pytest.mark.slow
def test_a_killed_process_is_said_and_replaced(opened: CatalogService) -> None:
    """The kernel takes the process of the question first where memory runs out."""
    _count(opened)
    ended: list[ForetokenError] = []

    def ask() -> None:
        try:
            read_table(opened.query_sql(SqlQuery(text=_FOREVER)))
        except ForetokenError as err:
            ended.append(err)

    asking = threading.Thread(target=ask)
    asking.start()
    while not any(answer._process for answer in opened._sql._answers):
        time.sleep(0.01)
    for pid in _pids_of(opened):
        os.kill(pid, signal.SIGKILL)
    asking.join(_HANG_S)
    assert ["memory"] == [error.details["limit"] for error in ended]
    assert 3 == _count(opened)


@pytest.mark.slow
def test_a_crashed_process_is_said(opened: CatalogService) -> None:
    _count(opened)
    reader = opened.query_sql(SqlQuery(text="FROM range(100000000)", max_num_rows=10**6))
    for pid in _pids_of(opened):
        os.kill(pid, signal.SIGSEGV)
    with pytest.raises(QueryLimitError, match="SIGSEGV"):
        read_table(reader)
    assert 3 == _count(opened)


@pytest.mark.slow
def test_no_process_outlives_the_catalog(tmp_path: Path) -> None:
    """Whatever ends the catalog: the processes' input ends with it."""
    program = (
        "import os, signal, sys\n"
        "from foretoken.catalog.config import CatalogConfig\n"
        "from foretoken.catalog.service import CatalogService\n"
        "from foretoken.domain.measurements.measurement import SqlQuery\n"
        "service = CatalogService(CatalogConfig(path=sys.argv[1], sql_max_rows=10**12))\n"
        "service.open()\n"
        "reader = service.query_sql(SqlQuery(text='FROM range(1000000000000)'))\n"
        "print(service._sql._answers.pop()._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "catalog.duckdb")],
        stdout=subprocess.PIPE,
        check=False,
    ).stdout
    while _is_running(int(said)):
        time.sleep(0.01)


@pytest.mark.slow
def test_closing_the_catalog_ends_its_processes(opened: CatalogService) -> None:
    reader = opened.query_sql(SqlQuery(text="FROM range(1000000)"))
    pids = _pids_of(opened)
    assert pids
    opened.close()
    assert set() == {pid for pid in pids if _is_running(pid)}
    with pytest.raises(ForetokenError):
        read_table(reader)


def _pids_of(service: CatalogService) -> set[int]:
    """Return the processes that answer questions of a catalog."""
    processes = service._sql._processes
    assert processes is not None
    answering = {answer._process for answer in service._sql._answers if answer._process}
    return {process.pid for process in answering | set(processes._idle)}


def _is_running(pid: int) -> bool:
    state = subprocess.run(
        [_PS, "-o", "state=", "-p", str(pid)], stdout=subprocess.PIPE, text=True, check=False
    ).stdout
    return bool(state) and not state.startswith("Z")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, CatalogClient]]:
    """A catalog in a process of its own: its number, and a client."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not tell the memory of another process")
    home = tmp_path_factory.mktemp("server")
    config = home / "foretoken.yaml"
    config.write_text(_CONFIG)
    command = [
        sys.executable, "-m", "foretoken.app", "--config", str(config), "--home", str(home),
        "serve", "catalog", "--port", "0", "--metrics-port", "-1",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        client = CatalogClient.connect(ChannelOptions(address=address, deadline_s=_HANG_S))
        list(client.record(run(), batches(gemms([1, 2, 3]))))
        yield process.pid, client
        client.close()
        process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNAWAYS)
def test_every_runaway_ends_and_the_server_goes_on(
    name: str, server: tuple[int, CatalogClient]
) -> None:
    pid, client = server
    assert 3 == _count(client)
    before = _resident_bytes(pid)
    outcome = _outcome_of(client, RUNAWAYS[name])
    assert outcome in {"time", "memory", "disk", "rows", "size", "crash", "refused", "answered"}
    assert 3 == _count(client)
    assert _resident_bytes(pid) - before < _MAX_GROWTH_BYTES


@pytest.mark.slow
def test_the_server_did_not_grow(server: tuple[int, CatalogClient]) -> None:
    """However often what nothing used to end is asked."""
    pid, client = server
    before = _resident_bytes(pid)
    for _ in range(5):
        for text in NAMED_RUNAWAYS.values():
            _outcome_of(client, text)
    assert _resident_bytes(pid) - before < _MAX_GROWTH_BYTES
    assert 3 == _count(client)


def test_the_runaways_are_many_and_no_two_are_the_same() -> None:
    assert len(set(RUNAWAYS.values())) == len(RUNAWAYS)
    assert len(RUNAWAYS) - len(NAMED_RUNAWAYS) >= 60


def _resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
