"""Two pods of a service that share its jobs, for tests that kill them in the middle.

FORETOKEN_KILLS is how often, of each kind of job: a few by default, 100 for a release (with
`pytest -o faulthandler_timeout=0`: that many take longer than a test may).
"""

import itertools
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from pods import Pods

from foretoken.catalog.service import CatalogService
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.job_wait import wait_for_job
from foretoken.domain.job import Job, JobState
from foretoken.domain.job_record import JobRecord

NUM_KILLS = int(os.environ.get("FORETOKEN_KILLS", "3"))
TIMEOUT_S = 120.0


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Fleet:
    """Two pods of a service, started again where they ended, and a client of both."""

    def __init__(
        self,
        pods: Pods,
        folder: Path,
        service: str,
        catalog: str,
        section: Mapping[str, Any] | None = None,
    ) -> None:
        """Start both; `section` is the service's in their configuration, sharing apart."""
        self._pods, self._service, self._catalog = pods, service, catalog
        self._section = section or {}
        self._numbers = itertools.count()
        self._folder = folder
        self._ports = [free_port(), free_port()]
        self._pids = [self._start(port) for port in self._ports]
        addresses = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self.options = ChannelOptions(address=f"ipv4:{addresses}", reconnect_delay_s=0.05)

    def _start(self, port: int) -> int:
        sharing = {"shares_jobs": True, "job_lease_s": 1.5}
        config: dict[str, Any] = {
            # A pod's folder goes with it.
            "home": str(self._folder / f"{self._service}-{next(self._numbers)}"),
            "endpoints": {"catalog": self._catalog},
            "server": {"port": port, "metrics_port": -1, "drain_s": 1, "grace_s": 5},
            "log": {"level": "ERROR"},
            "predictor": {**sharing, "starter": ""},
            "simulator": {**sharing, "num_search_workers": 1},
        }
        config.setdefault(self._service, {})
        config[self._service] |= self._section
        return self._pods.start(self._service, config)

    def end(self, pid: int, by: signal.Signals) -> None:
        """End a pod, and start another in its place when it is gone."""
        place = self._pids.index(pid)
        self._pods.end(pid, by)
        end_s = time.monotonic() + TIMEOUT_S
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < end_s
            time.sleep(0.02)
        self._pids[place] = self._start(self._ports[place])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids:
            self._pods.end(pid, signal.SIGKILL)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(self._pids)


def record_of(catalog: CatalogService, service: str, job_id: str) -> JobRecord:
    """Return a job as the catalog has it."""
    (record,) = (r for r in catalog.list_job_records(service) if r.job.job_id == job_id)
    return record


def _kill_in_the_middle(
    fleet: Fleet, catalog: CatalogService, service: str, job: Job, delay_s: float
) -> bool:
    """Kill whoever works on a job, some time after it began; false where it was through before."""
    end_s = time.monotonic() + TIMEOUT_S
    while (record := record_of(catalog, service, job.job_id)).job.state is JobState.QUEUED:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    time.sleep(delay_s)
    record = record_of(catalog, service, job.job_id)
    if record.job.state.is_final:
        return False
    fleet.end(int(record.worker.split("-")[-2]), signal.SIGKILL)
    return True


def play_with_kills(
    fleet: Fleet,
    catalog: CatalogService,
    client: Any,
    create: Callable[[int], Job],
    check: Callable[[Job], None],
) -> None:
    """Create jobs and kill their workers until that was done often enough."""
    draw = random.Random(7)  # noqa: S311 - when to kill
    service = type(client).short_name()
    num_killed, longest_s = 0, 1.0
    for number in itertools.count():
        job = create(number)
        begun_s = time.monotonic()
        num_killed += _kill_in_the_middle(fleet, catalog, service, job, draw.random() * longest_s)
        ended = wait_for_job(client, job)
        assert JobState.SUCCEEDED is ended.state, ended.error_message
        check(job)
        if num_killed >= NUM_KILLS:
            break
        longest_s = min(longest_s, time.monotonic() - begun_s)
    print(f"{num_killed} kills in {number + 1} jobs")  # noqa: T201
