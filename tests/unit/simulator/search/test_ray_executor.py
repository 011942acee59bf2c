"""Searches on a Ray cluster: two nodes of one core each, one of which is killed."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import search_tasks
from search_simulations import Load, simulate

from foretoken.domain.errors import InvalidRequestError, ServiceUnavailableError
from foretoken.jobs.executor import Executor
from foretoken.jobs.executors.choice import open_executor
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.simulator.cost.tables import flat_tables

ray = pytest.importorskip("ray", reason="the extra `search` is not installed")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [
    pytest.mark.slow,
    # Ray leaves files and sockets to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

_NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


# The head's process for a client ends at once, as often as there are files to take away.
_DYING = """
import os, pathlib
words = pathlib.Path("/proc/self/cmdline").read_bytes().split(b"\\0")
if b"--mode=specific-server" in words and b"ray.util.client.server" in words:
    for left in pathlib.Path(__file__).parent.glob("dies-*"):
        left.unlink()
        os._exit(1)
"""


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose files `dies-*` are deaths to come of the head's processes."""
    folder = tmp_path_factory.mktemp("deaths")
    (folder / "sitecustomize.py").write_text(_DYING)
    return folder


@pytest.fixture(scope="module")
def client_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def head(deaths: Path, client_port: int) -> Iterator[Any]:
    # As if this folder were installed on the nodes.
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", f"{deaths}:{Path(search_tasks.__file__).parent}")
        arguments = {**_NODE, "include_dashboard": False, "ray_client_server_port": client_port}
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=arguments)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def cluster(head: Any) -> Any:
    """Two nodes, whichever test ran before and killed one."""
    if not head.worker_nodes:
        head.add_node(**_NODE)
    return head


@pytest.fixture
def executor(cluster: Any) -> Iterator[Executor]:
    executor = open_executor(cluster.address)
    yield executor
    executor.close()


def test_a_cluster_gives_what_one_thread_gives(executor: Executor) -> None:
    """Simulations, bit for bit."""
    loads = [Load(seed=seed, rate_rps=20.0 * (1 + seed % 4)) for seed in range(12)]
    expected = dict(InlineExecutor().run(simulate, loads, flat_tables()))
    found = dict(executor.run(simulate, loads, flat_tables()))
    assert 2 == executor.num_workers
    assert sorted(expected) == sorted(found)
    for index, times in expected.items():
        np.testing.assert_array_equal(times, found[index], strict=True)


def test_a_client_whose_process_on_the_head_dies_gets_another(
    cluster: Any, client_port: int, deaths: Path
) -> None:
    """As a simulator outside the cluster does it (`ray://`)."""
    (deaths / "dies-1").touch()
    executor = open_executor(f"ray://{cluster.head_node.node_ip_address}:{client_port}")
    results = dict(executor.run(search_tasks.add, range(4), 1))
    executor.close()
    assert {item: item + 1 for item in range(4)} == results
    assert not list(deaths.glob("dies-*"))


def test_both_nodes_work(executor: Executor, tmp_path: Path) -> None:
    pids = {pid for _, pid in executor.run(search_tasks.meet, range(2), str(tmp_path))}
    assert 2 == len(pids)
    assert os.getpid() not in pids


def test_errors_of_tasks_are_the_run_s(executor: Executor) -> None:
    with pytest.raises(InvalidRequestError, match="is 2"):
        list(executor.run(search_tasks.refuse, range(4), None))
    with pytest.raises(ServiceUnavailableError, match="item 1 could not be done"):
        list(executor.run(search_tasks.die, range(4), None))


def test_a_killed_worker_s_item_is_done_again(executor: Executor, tmp_path: Path) -> None:
    results = dict(executor.run(search_tasks.die_once, range(8), str(tmp_path)))
    assert {item: item * item for item in range(8)} == results
    assert (tmp_path / "died").exists()


def test_two_searches_share_the_cluster(executor: Executor, tmp_path: Path) -> None:
    """The first ends only when the second's last item is done: neither waits for the other."""
    last = tmp_path / "7"
    first = threading.Thread(
        target=lambda: list(executor.run(search_tasks.wait_for_file, [0], str(last))), daemon=True
    )
    first.start()
    while not (tmp_path / "7.waits-0").exists():
        assert first.is_alive()
        time.sleep(0.01)
    second = threading.Thread(
        target=lambda: list(executor.run(search_tasks.count_call, range(8), str(tmp_path))),
        daemon=True,
    )
    second.start()
    second.join(60.0)
    was_shared = last.exists()
    last.touch()
    first.join(60.0)
    assert (was_shared, first.is_alive(), second.is_alive()) == (True, False, False)


def test_a_killed_node_s_items_are_done_again(cluster: Any, executor: Executor) -> None:
    """The results are those of one thread."""
    loads = [Load(seed=seed, rate_rps=30.0, num_requests=60) for seed in range(60)]
    expected = dict(InlineExecutor().run(simulate, loads, flat_tables()))
    results = executor.run(simulate, loads, flat_tables())
    found = dict([next(results)])
    (node,) = cluster.worker_nodes
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    found.update(results)
    cluster.remove_node(node)
    assert sorted(expected) == sorted(found)
    for index, times in expected.items():
        np.testing.assert_array_equal(times, found[index], strict=True)


def test_a_connection_that_was_ended_is_made_again(executor: Executor) -> None:
    """To the executor's cluster: Ray by itself takes the newest of this machine."""
    ray.shutdown()
    assert {0: 1, 1: 2} == dict(executor.run(search_tasks.add, range(2), 1))


def test_an_address_where_nobody_listens_is_said() -> None:
    with pytest.raises(ServiceUnavailableError, match=r"127.0.0.1:1 does not answer .* ray_addr"):
        open_executor("127.0.0.1:1")
