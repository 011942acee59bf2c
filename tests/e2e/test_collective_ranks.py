"""Nodes that time collectives together: real processes that meet, and some that are killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.ranks.group_spec import GroupSpec
from foretoken.profiler.ranks.rendezvous import RendezvousSpec
from foretoken.profiler.ranks.rows import time_collectives
from foretoken.profiler.recording.batches import RowBuilder
from foretoken.wire.arrow import read_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_FAST = TimerSpec(min_samples=3, warm_up_s_min=0.0, warm_up_s_max=0.002, case_s_max=0.01)
_ROWS = RowBuilder("cpu", "torch", "0")
_WAIT_S = 240.0
# Ranks that work beat every second; a node that is stopped for longer here is a killed one.
_SILENT_S = 6.0
_ASKED = ("profile", "collectives", "--operator", "all_reduce", "--sizes", "8KiB", "--quick")


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    # A test that fails leaves no processes behind.
    for pid in _pids_with(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


def start_node(home: Path, port: int, rank: int, *words: str) -> "subprocess.Popen[str]":
    settings = {"ENDPOINT": f"127.0.0.1:{port}", "NUM_NODES": "2", "NODE_RANK": str(rank)}
    settings["SILENT_S"] = str(_SILENT_S)
    environment = {
        **os.environ,
        **{f"FORETOKEN_PROFILER__RENDEZVOUS__{name}": text for name, text in settings.items()},
    }
    command = (sys.executable, "-m", "foretoken.app", "--home", str(home / f"node-{rank}"))
    return subprocess.Popen(
        (*command, *words),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lead(port: int, *, num_ranks: int, wait_s: float = _WAIT_S) -> GroupSpec:
    endpoint = f"127.0.0.1:{port}"
    rendezvous = RendezvousSpec(
        endpoint=endpoint, num_nodes=2, node_rank=0, wait_s=wait_s, silent_s=_SILENT_S
    )
    return GroupSpec(num_ranks=num_ranks, is_cuda=False, seed=0, timer=_FAST, rendezvous=rendezvous)


def call_of(num_nodes: int, message_bytes: int = 8192, devices_per_node: int = 2) -> OperatorCall:
    dims = {
        "message_bytes": message_bytes,
        "devices_per_node": devices_per_node,
        "num_nodes": num_nodes,
    }
    return OperatorCall(operator="all_reduce", dtype=DType.FP32, dims=dims)


def test_nodes_of_torchrun_time_together_and_the_first_process_of_the_first_records(
    home: Path, port: int
) -> None:
    """Groups are one rank of each node, two of one node, and all four."""
    agents = [
        subprocess.Popen(
            (
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--nproc-per-node", "2", "--node-rank", str(node)),
                *("--master-addr", "127.0.0.1", "--master-port", str(port)),
                *("-m", "foretoken.app", "--home", str(home / f"node-{node}")),
                *(*_ASKED, "--ranks", "1,2", "--nodes", "1,2"),
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    complaints = [agent.communicate(timeout=_WAIT_S)[1] for agent in agents]
    assert [0, 0] == [agent.returncode for agent in agents], "".join(complaints)
    assert {"1x2", "2x1", "2x2"} == {_group_of(row) for row in _rows_in(home / "node-0")}
    assert [] == _rows_in(home / "node-1")
    assert "node 0 records" in complaints[1]


def test_a_node_that_never_comes_fails_its_rows_and_no_others(port: int) -> None:
    rows = list(
        time_collectives([call_of(1), call_of(2)], lead(port, num_ranks=2, wait_s=1.0), _ROWS)
    )
    assert ["ok", "failed"] == [row["status"] for row in rows]
    assert "2 ranks on each of 2 nodes" in rows[1]["status_reason"]


def test_a_node_without_a_leader_says_where_it_looked(home: Path, port: int) -> None:
    config = home / "config.yaml"
    config.write_text("profiler: {rendezvous: {wait_s: 1.0}}", encoding="utf-8")
    lonely = start_node(home, port, 1, "--config", str(config), *_ASKED)
    _, complaints = lonely.communicate(timeout=_WAIT_S)
    assert 1 == lonely.returncode
    assert f"no node 0 at 127.0.0.1:{port} within 1 s" in " ".join(complaints.split())


def test_a_killed_rank_costs_one_row_and_a_killed_node_the_rest(home: Path, port: int) -> None:
    """The other node starts its rank anew; once that node is gone, its silence is reported."""
    calls = [call_of(2, 2**power, devices_per_node=1) for power in range(12, 17)]
    with start_node(home, port, 1, *_ASKED) as other:
        rows = time_collectives(calls, lead(port, num_ranks=1), _ROWS)
        found = [next(rows)]
        (rank,) = _ranks_of(other.pid)
        os.kill(rank, signal.SIGKILL)
        found += [next(rows), next(rows)]
        other.kill()
        found += list(rows)
        other.communicate(timeout=_WAIT_S)
    assert ["ok", "failed", "ok", "failed", "failed"] == [row["status"] for row in found]
    assert all(row["status_reason"] for row in found if row["status"] == "failed")


def test_a_killed_leader_ends_the_other_node_and_all_ranks(home: Path, port: int) -> None:
    words = ("profile", "collectives", "--sizes", "1KiB:1MiB", "--ranks", "1", "--nodes", "2")
    with start_node(home, port, 1, *words) as other, start_node(home, port, 0, *words) as leader:
        deadline_s = time.monotonic() + _WAIT_S
        while not _ranks_of(other.pid) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        ranks = _ranks_of(other.pid) + _ranks_of(leader.pid)
        leader.kill()
        _, complaints = other.communicate(timeout=_WAIT_S)
        # Their end of the pipe is closed once all its ranks are gone.
        leader.communicate(timeout=_WAIT_S)
    assert 1 == other.returncode
    assert "node 0" in complaints
    assert ranks
    # A process closes its files a little before it is gone.
    while any(_is_running(pid) for pid in ranks) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert [] == [pid for pid in ranks if _is_running(pid)]


def _rows_in(home: Path) -> list[dict[str, object]]:
    """Return what a node has recorded; one that never opened a catalog has nothing."""
    if not (home / "catalog.duckdb").exists():
        return []
    with Composition(AppConfig(home=str(home))) as services:
        rows = services.catalog.read_measurements(MeasurementFilter(include_flagged=True))
        return list(read_table(rows).to_pylist())


def _group_of(row: dict[str, object]) -> str:
    dims = dict(row["dims"])  # type: ignore[call-overload]
    return f"{dims['devices_per_node']}x{dims['num_nodes']}"


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _ranks_of(pid: int) -> list[int]:
    """Return the processes that a node has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            command = (folder / "cmdline").read_text(encoding="utf-8")
        except OSError:
            continue
        if int(fields[1]) == pid and "foretoken.profiler.ranks.rank" in command:
            found.append(int(folder.name))
    return sorted(found)


def _pids_with(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text(encoding="utf-8")
        except OSError:
            continue
        if text in command and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found
