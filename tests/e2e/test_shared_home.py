"""One home in several terminals: commands go through the process that has the catalog open."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import CatalogBusyError
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.wire.arrow import rows_to_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Opens the catalog of a home, says so, and closes it when its input ends.
_HOLD = """
import sys, foretoken
with foretoken.open(sys.argv[1]) as ft:
    ft.catalog.list_runs()
    print("open", flush=True)
    sys.stdin.read()
"""
_NUM_BATCHES = 20
_RUN = Run(run_id="through-another", kind=RunKind.PROFILE, tool="tests")


def _start(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FORETOKEN_HOME": str(home)},
    )


def _sockets(home: Path) -> Path:
    return home / "catalog.duckdb.sockets"


def _hold(home: Path) -> subprocess.Popen[str]:
    process = _start(home, "-c", _HOLD, str(home))
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def _run(home: Path, *words: str) -> tuple[Any, str]:
    """Return what a command prints as JSON, and its notes."""
    command = [sys.executable, "-m", "foretoken.app", "--home", str(home), "--output", "json"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def _batches() -> Iterator[MeasurementBatch]:
    for index in range(_NUM_BATCHES):
        row = {
            "operator": "gemm",
            "phase": "forward",
            "dtype": "bf16",
            "dims": {"m": 1 + index, "n": 4096, "k": 4096},
            "device": "a30",
            "latency_us_median": 50.0 + index,
            "status": "ok",
        }
        is_last = index == _NUM_BATCHES - 1
        yield MeasurementBatch(batch_index=index, rows=rows_to_table([row]), is_last=is_last)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = _hold(tmp_path)
    yield process
    _end(process)


def test_commands_of_a_second_terminal_work_and_say_through_whom(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    """Reading, SQL, estimates and writing: none fails because the first has the catalog."""
    said = f"process {holder.pid} has the catalog open"
    assert said in _run(tmp_path, "catalog", "runs")[1]
    rows, notes = _run(tmp_path, "catalog", "sql", "SELECT count(*) AS n FROM measurements")
    assert rows == [{"n": 0}]
    assert notes.count(said) == 1
    words = ("predict", "gemm", "m=1024", "n=4096", "k=4096", "--device", "a30")
    estimate, notes = _run(tmp_path, *words)
    assert estimate["latency_us"] > 0
    assert said in notes


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_a_run_recorded_through_a_process_that_ends_is_whole(tmp_path: Path, by: int) -> None:
    """The one that recorded opens the catalog itself, and sends again what has no receipt."""
    holder = _hold(tmp_path)
    with foretoken.open(str(tmp_path)) as ft:
        assert isinstance(ft.catalog, CatalogClient)
        for receipt in ft.catalog.record(_RUN, _batches()):
            if receipt.batch_index == _NUM_BATCHES // 2:
                with holder:
                    holder.send_signal(by)
        (found,) = ft.catalog.list_runs()
        assert found.num_rows == _NUM_BATCHES
        # It is the owner now: who comes next works through it.
        runs, notes = _run(tmp_path, "catalog", "runs")
        assert [run["run"] for run in runs] == [_RUN.run_id]
        assert f"process {os.getpid()} has the catalog open" in notes


def test_one_of_several_takes_over_and_the_others_find_it(tmp_path: Path) -> None:
    """Whoever is first opens the catalog; nobody's calls fail."""
    first = _hold(tmp_path)
    second = _hold(tmp_path)
    with foretoken.open(str(tmp_path)) as ft:
        assert ft.catalog.list_runs() == ()
        _end(first)
        assert ft.catalog.list_runs() == ()
        _end(second)
        assert ft.catalog.list_runs() == ()


def test_what_a_killed_process_left_keeps_nobody_from_the_home(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    """Sockets without a process refuse; the next command opens the catalog and serves it."""
    _run(tmp_path, "catalog", "runs")
    _end(holder)
    left = sorted(path.name for path in _sockets(tmp_path).iterdir())
    assert left == ["catalog.sock", "owner.sock"]
    runs, notes = _run(tmp_path, "catalog", "runs")
    assert (runs, "has the catalog open" in notes) == ([], False)
    next_holder = _hold(tmp_path)
    assert f"process {next_holder.pid} has" in _run(tmp_path, "catalog", "runs")[1]
    _end(next_holder)


def test_a_closed_catalog_leaves_no_owner_behind(tmp_path: Path) -> None:
    """The socket by which an owner is found goes with it."""
    with foretoken.open(str(tmp_path)) as ft:
        ft.catalog.list_runs()
        assert (_sockets(tmp_path) / "owner.sock").is_socket()
    assert list(_sockets(tmp_path).iterdir()) == []


def test_a_home_whose_path_is_too_long_for_a_socket_is_shared_too(tmp_path: Path) -> None:
    """Sockets are named by way of the folder's descriptor."""
    home = tmp_path / ("long" * 30)
    home.mkdir()
    holder = _hold(home)
    assert f"process {holder.pid} has" in _run(home, "catalog", "runs")[1]
    _end(holder)


def test_a_folder_that_others_may_enter_is_not_trusted(tmp_path: Path) -> None:
    """Neither to listen in nor to connect to: another user could stand in for the owner."""
    folder = _sockets(tmp_path)
    folder.mkdir()
    folder.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(folder / "owner.sock"))
        stranger.listen()
        holder = _hold(tmp_path)
        with Composition(AppConfig(home=str(tmp_path))) as services:
            with pytest.raises(CatalogBusyError) as caught:
                _ = services.catalog
            assert caught.value.details["pid"] == str(holder.pid)
        _end(holder)


def test_a_server_wants_the_catalog_for_itself(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    """What stays when others leave does not go through one of them."""
    server = _start(tmp_path, "-m", "foretoken.app", "serve", "catalog", "--port", "0")
    assert server.wait(timeout=60) == 1
    assert holder.poll() is None
    _end(server)
