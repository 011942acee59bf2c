"""A profile whose processes are killed in the middle: nothing is lost, nothing is there twice."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.profiler.planning.coverage import KnownRows, Point, point_of_call
from foretoken.profiler.planning.plan import PlanLimits, make_plan
from foretoken.profiler.planning.wanted_call import PlanSite

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_OPERATORS = ("gelu", "layer_norm", "residual_add", "silu", "softmax")
_REQUEST = ProfileRequest(device="cpu", quick=True, operators=_OPERATORS)
_PATIENCE_S = 100.0
# Eight samples of a call, on any machine: none is through before it can be killed.
_TIMER = {
    "MIN_SAMPLES": "8",
    "MAX_SAMPLES": "8",
    "SAMPLE_US_MIN": "8000",
    "WARM_UP_S_MIN": "0.0",
    "WARM_UP_S_MAX": "0.005",
    "CASE_S_MAX": "0.1",
    "MAX_INPUT_SETS": "2",
}
_ALL = MeasurementFilter(include_failed=True, include_flagged=True)


class _Processes:
    """A catalog and a profiler that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._folder = folder
        self.profiler_home = folder / "profiler"
        self._running: list[subprocess.Popen[str]] = []

    def start_catalog(self) -> subprocess.Popen[str]:
        port = self.address.rpartition(":")[2]
        words = ("serve", "catalog", "--port", port, "--metrics-port", "-1")
        catalog = self._start(self._folder / "catalog", *words)
        assert catalog.stdout is not None
        assert catalog.stdout.readline().startswith("serving ")
        return catalog

    def start_profile(self, drift_check_s: float = 1.0) -> subprocess.Popen[str]:
        """Start a profile whose rows stay in the spool until the next check for drift."""
        endpoint = ("--endpoint", f"catalog={self.address}")
        chosen = [word for name in _OPERATORS for word in ("--operator", name)]
        words = (*endpoint, "profile", "--quick", *chosen)
        return self._start(self.profiler_home, *words, drift_check_s=drift_check_s)

    def _start(self, home: Path, *words: str, drift_check_s: float = 0.0) -> subprocess.Popen[str]:
        settings = {
            "FORETOKEN_PROFILER__DRIFT_CHECK_S": str(drift_check_s),
            **{f"FORETOKEN_PROFILER__QUICK_TIMER__{n}": text for n, text in _TIMER.items()},
            "FORETOKEN_PROFILER__BATCH_ROWS": "4",
            "FORETOKEN_PROFILER__BATCH_S": "0.5",
            "FORETOKEN_PROFILER__RECEIPT_S": "0.5",
            "FORETOKEN_PROFILER__NUM_THREADS": "1",
            # Each point once: disturbed cases are not timed again.
            "FORETOKEN_PROFILER__RETIME_RATIO": "0",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "foretoken.app", "--home", str(home), *words],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            with process:
                process.wait()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[_Processes]:
    started = _Processes(tmp_path)
    yield started
    started.close()


def _rows(address: str) -> pa.Table:
    with CatalogClient.connect(ChannelOptions(address=address)) as catalog:
        return pa.table(catalog.read_measurements(_ALL))


def _wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _wait_for_rows(address: str, num_rows: int) -> None:
    """Wait until the catalog has so many rows."""

    def are_there() -> bool:
        try:
            return bool(_rows(address).num_rows >= num_rows)
        except ServiceUnavailableError:
            return False

    _wait_until(are_there)


def _planned_points() -> Counter[Point]:
    site = PlanSite(device=find_device("cpu"), torch_device=torch.device("cpu"))
    plan = make_plan(_REQUEST, site, KnownRows(), PlanLimits())
    return Counter(map(point_of_call, plan.all_calls))


def _measured_points(address: str) -> Counter[Point]:
    return Counter(
        (
            row["operator"],
            row["phase"],
            row["dtype"],
            row["variant"] or "",
            row["kernel"],
            tuple(dict(row["dims"])[name] for name in find_operator(row["operator"]).dim_names),
        )
        for row in _rows(address).to_pylist()
    )


def test_what_is_killed_in_the_middle_loses_and_repeats_nothing(processes: _Processes) -> None:
    """The profile is killed and its files are gone, as on another machine; it is killed once more.

    Then the catalog is, and stays away while measuring goes on. In the end every planned call has a
    row, as often as planned, as if nothing had happened.
    """
    planned = _planned_points()
    catalog = processes.start_catalog()
    profile = processes.start_profile()
    _wait_for_rows(processes.address, 5)
    processes.kill(profile)
    shutil.rmtree(processes.profiler_home)
    spool = processes.profiler_home / "profiler" / "spool"
    profile = processes.start_profile(drift_check_s=_PATIENCE_S)
    _wait_for_spool(spool, 5)
    processes.kill(profile)
    (killed,) = spool.iterdir()
    before = _rows(processes.address).num_rows
    assert 5 <= before < planned.total()
    profile = processes.start_profile()
    # The first thing it does is to hand over what the one before could not.
    _wait_for_rows(processes.address, before + 5)
    _wait_until(lambda: any(path != killed for path in spool.iterdir()))
    processes.kill(catalog)
    _wait_for_spool(spool, 5, killed)
    assert profile.poll() is None
    processes.start_catalog()
    assert profile.wait(_PATIENCE_S) == 0
    assert planned == _measured_points(processes.address)
    assert list(spool.iterdir()) == []


def _wait_for_spool(spool: Path, num_rows: int, but: Path = Path()) -> None:
    """Wait until so many rows are on disk, in the folders of other runs than that one."""

    def are_there() -> bool:
        paths = [path for path in spool.rglob("*.jsonl") if path.parent != but]
        return sum(map(_count_lines, paths)) >= num_rows

    _wait_until(are_there)


def _count_lines(path: Path) -> int:
    try:
        return len(path.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:  # acknowledged meanwhile
        return 0
