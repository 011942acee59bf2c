"""Run tasks on a Ray cluster (extra `search`).

Machines of the cluster have the same Foretoken installed. Ray starts a task again whose worker or
node died, and keeps what a run shares once per node.
"""

import itertools
import logging
import pickle
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray import exceptions

from foretoken.domain.errors import ServiceUnavailableError
from foretoken.jobs.executor import (
    CHECK_PERIOD_S,
    MAX_ATTEMPTS,
    R,
    S,
    T,
    WorkerCounts,
    keep_going,
    pack_function,
)
from foretoken.jobs.executors.outcome import Outcome, attempt

_log = logging.getLogger(__name__)

# Tasks that wait at the cluster for each core, so that none is idle while an answer travels.
_TASKS_PER_CORE = 2
# How long a cluster may have no core at all before a run gives up.
_NO_CORE_S_MAX = 60.0
_CONNECT_TIMEOUT_S = 5.0
# A head forks a process for each client, out of one that has threads of gRPC: with Ray 2.60 one in
# ten (three in five on another machine) was dead before it ran anything. The next one lives.
_CLIENT_TRIES = 4
# Totals of what the nodes have that are up.
_resources: Callable[[], Mapping[str, float]] = ray.cluster_resources
# What the last runs share stays unpacked in a worker.
_MAX_KEPT_RUNS = 4
_kept: OrderedDict[str, tuple[Any, Any]] = OrderedDict()


class RayExecutor:
    """Implements `Executor` with tasks of a Ray cluster.

    `address` is what `ray.init` takes: "HOST:PORT", "ray://HOST:PORT", or "auto" for the cluster
    this machine is in. `num_workers` 0: as many as the cluster has cores.
    """

    def __init__(self, address: str, num_workers: int = 0) -> None:
        self._address = address
        self._num_workers = num_workers
        self._num_runs = 0
        self._is_owner = False
        self._is_closed = False
        self._lock = threading.Lock()

    def open(self) -> None:
        """Connect to the cluster.

        Raises:
            ServiceUnavailableError: nothing answers at the address.

        """
        if ray.is_initialized():
            return
        _check_reachable(self._address)
        _connect(self._address)
        self._is_owner = True

    @property
    def num_workers(self) -> int:
        """Tasks that run at once: the cores that the cluster has now, or fewer."""
        num_cores = int(_resources().get("CPU", 0)) if ray.is_initialized() else 0
        return min(self._num_workers or num_cores, num_cores) or 1

    @property
    def workers(self) -> WorkerCounts:
        """The cores that the cluster has now; Ray starts workers again by itself."""
        is_connected = ray.is_initialized()
        return WorkerCounts(num_alive=int(_resources().get("CPU", 0)) if is_connected else 0)

    def run(
        self,
        function: Callable[[T, S], R],
        items: Sequence[T],
        shared: S,
        check: Callable[[], None] = keep_going,
    ) -> Iterator[tuple[int, R]]:
        """Yield the index and result of every item as it is done; as `Executor.run`."""
        if self._is_closed:
            raise _closed()
        # Others of the process may have left the cluster, and Ray would join any that it finds.
        self.open()
        content = pack_function(function, shared)
        # In a list, so that the tasks get the reference, and unpack what is behind it once.
        kept = [ray.put(content)]
        name = uuid.uuid4().hex
        remote = ray.remote(max_retries=MAX_ATTEMPTS - 1, num_cpus=1)(_work)
        with self._lock:
            self._num_runs += 1
        indexes = iter(range(len(items)))
        pending: dict[Any, int] = {}
        try:
            while True:
                for index in itertools.islice(indexes, max(self._share - len(pending), 0)):
                    item = pickle.dumps(items[index], pickle.HIGHEST_PROTOCOL)
                    pending[remote.remote(name, kept, item)] = index
                if not pending:
                    return
                for reference in self._wait(list(pending), check):
                    index = pending.pop(reference)
                    yield index, _fetch(reference, index).unpack()
        finally:
            with self._lock:
                self._num_runs -= 1
            self._drop(pending)

    def close(self) -> None:
        """Leave the cluster; runs that wait for results fail."""
        self._is_closed = True
        if self._is_owner and ray.is_initialized():
            ray.shutdown()

    @property
    def _share(self) -> int:
        """Tasks of one run that may be at the cluster: all runs have as many."""
        return max(_TASKS_PER_CORE * self.num_workers // max(self._num_runs, 1), 1)

    def _wait(self, pending: list[Any], check: Callable[[], None]) -> list[Any]:
        """Return references that are done, at least one."""
        had_core_s = time.monotonic()
        while True:
            check()
            if self._is_closed:
                raise _closed()
            done, _ = ray.wait(pending, num_returns=len(pending), timeout=0.0, fetch_local=False)
            if not done:
                done, _ = ray.wait(pending, num_returns=1, timeout=CHECK_PERIOD_S)
            if done:
                return [*done]
            if _resources().get("CPU", 0) > 0:
                had_core_s = time.monotonic()
            elif time.monotonic() - had_core_s > _NO_CORE_S_MAX:
                raise _away(self._address, "it has had no core for a minute")

    def _drop(self, pending: Iterable[Any]) -> None:
        if self._is_closed or not ray.is_initialized():
            return
        for reference in pending:
            ray.cancel(reference)


def _work(name: str, kept: list[Any], item: bytes) -> Outcome:
    """Do one item of a run in a worker of the cluster."""

    def task() -> object:
        if name not in _kept:
            _kept[name] = pickle.loads(ray.get(kept[0]))  # noqa: S301 - the run's own
        _kept.move_to_end(name)
        while len(_kept) > _MAX_KEPT_RUNS:
            _kept.popitem(last=False)
        function, shared = _kept[name]
        return function(pickle.loads(item), shared)  # noqa: S301

    return attempt(task)


def _fetch(reference: Any, index: int) -> Outcome:
    try:
        outcome: Outcome = ray.get(reference)
    except exceptions.RayError as err:
        raise ServiceUnavailableError(
            f"item {index} could not be done on the Ray cluster, after {MAX_ATTEMPTS} attempts: "
            f"{type(err).__name__}: {_first_line(str(err))}"
        ) from err
    return outcome


def _check_reachable(address: str) -> None:
    """Say at once that nobody listens, for Ray itself tries for long."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as err:
        raise _away(address, err.strerror or str(err)) from err


def _connect(address: str) -> None:
    """Join a cluster, or be the client of its head (`ray://`)."""
    num_tries = _CLIENT_TRIES if address.startswith("ray://") else 1
    for number in range(1, num_tries + 1):
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as err:
            # A head's error is its traceback.
            why = str(err).strip().rpartition("\n")[2]
            if number == num_tries:
                raise _away(address, why) from err
            _log.warning("ray_address=%s try=%d of %d: %s", address, number, num_tries, why)
        else:
            return


def _away(address: str, why: str) -> ServiceUnavailableError:
    return ServiceUnavailableError(
        f"the Ray cluster at {address} does not answer ({_first_line(why)}): check ray_address, or"
        " leave it empty for processes of this machine"
    )


def _closed() -> ServiceUnavailableError:
    return ServiceUnavailableError("this process has left its Ray cluster: the service is ending")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
