"""Pods are killed in the middle of jobs: others go on with them, and each has one result.

FORETOKEN_KILLS is how often, of each kind of job: a few by default, 100 for a release.
"""

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from pods import Pods

from foretoken.app.serve import serve_catalog_at
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.job_wait import wait_for_job
from foretoken.client.services import PredictorClient, SimulatorClient
from foretoken.domain import schema
from foretoken.domain.errors import ForetokenError
from foretoken.domain.job import Job, JobState
from foretoken.domain.job_record import JobRecord
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.domain.models.architecture import find_model
from foretoken.domain.ports import TrainRequest
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.wire.arrow import rows_to_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_NUM_KILLS = int(os.environ.get("FORETOKEN_KILLS", "3"))
_TIMEOUT_S = 120.0
_SEARCH = TrainingSearchRequest(
    scenario=TrainingScenario(
        model=find_model("tiny-llama"),
        device="cpu",
        dtype=DType.FP32,
        sequence_length=128,
        global_batch_size=8,
        layout=ParallelLayout(dp=4),
    ),
    num_finalists=12,
)
# What differs from run to run.
_MEASURED = {"wall_s": 0.0, "cpu_s": 0.0, "closed_form_s": 0.0, "job_id": ""}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Fleet:
    """Two pods of a service, started again where they ended, and a client of both."""

    def __init__(self, pods: Pods, folder: Path, service: str, catalog: str) -> None:
        self._pods, self._service, self._catalog = pods, service, catalog
        self._numbers = itertools.count()
        self._folder = folder
        self._ports = [_free_port(), _free_port()]
        self._pids = [self._start(port) for port in self._ports]
        addresses = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self.options = ChannelOptions(address=f"ipv4:{addresses}", reconnect_delay_s=0.05)

    def _start(self, port: int) -> int:
        sharing = {"shares_jobs": True, "job_lease_s": 1.5}
        config = {
            # A pod's folder goes with it.
            "home": str(self._folder / f"{self._service}-{next(self._numbers)}"),
            "endpoints": {"catalog": self._catalog},
            "server": {"port": port, "metrics_port": -1, "drain_s": 1, "grace_s": 5},
            "log": {"level": "ERROR"},
            "predictor": {**sharing, "starter": ""},
            "simulator": {**sharing, "num_search_workers": 1},
        }
        return self._pods.start(self._service, config)

    def end(self, pid: int, by: signal.Signals) -> None:
        """End a pod, and start another in its place when it is gone."""
        place = self._pids.index(pid)
        self._pods.end(pid, by)
        end_s = time.monotonic() + _TIMEOUT_S
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


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    with Pods() as pods:
        yield pods


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[CatalogService]:
    service = CatalogService(CatalogConfig(path=str(tmp_path / "catalog.duckdb"), num_threads=1))
    service.open()
    yield service
    service.close()


@pytest.fixture
def address(catalog: CatalogService) -> Iterator[str]:
    address = f"127.0.0.1:{_free_port()}"
    with serve_catalog_at(address, catalog, grace_s=1.0):
        yield address


def _record(catalog: CatalogService, service: str, job_id: str) -> JobRecord:
    (record,) = (r for r in catalog.list_job_records(service) if r.job.job_id == job_id)
    return record


def _kill_in_the_middle(
    fleet: _Fleet, catalog: CatalogService, service: str, job: Job, delay_s: float
) -> bool:
    """Kill whoever works on a job, some time after it began; false where it was through before."""
    end_s = time.monotonic() + _TIMEOUT_S
    while (record := _record(catalog, service, job.job_id)).job.state is JobState.QUEUED:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    time.sleep(delay_s)
    record = _record(catalog, service, job.job_id)
    if record.job.state.is_final:
        return False
    fleet.end(int(record.worker.split("-")[-2]), signal.SIGKILL)
    return True


def _play(
    fleet: _Fleet,
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
        if num_killed >= _NUM_KILLS:
            break
        longest_s = min(longest_s, time.monotonic() - begun_s)
    print(f"{num_killed} kills in {number + 1} jobs")  # noqa: T201


def test_searches_outlive_their_pods(
    pods: Pods, tmp_path: Path, catalog: CatalogService, address: str
) -> None:
    """Each has the report of one that nobody disturbed, and shows each finalist once."""
    with (
        _Fleet(pods, tmp_path, "simulator", address) as fleet,
        SimulatorClient.connect(fleet.options) as client,
    ):

        def report(job: Job) -> Any:
            found = client.get_training_search_report(job.job_id)
            return schema.encode(replace(found, **_MEASURED))  # type: ignore[arg-type]

        first = client.create_training_search(_SEARCH)
        wait_for_job(client, first)
        expected = report(first)

        def check(job: Job) -> None:
            assert expected == report(job)
            shown = [finalist.name for finalist in client.watch_training_search(job.job_id)]
            assert len(set(shown)) == len(shown) == len(expected["finalists"])

        _play(fleet, catalog, client, lambda _: client.create_training_search(_SEARCH), check)


def _gemms() -> list[dict[str, Any]]:
    return [
        {
            "operator": "gemm",
            "phase": "forward",
            "dtype": "bf16",
            "dims": {"m": m, "n": n, "k": 4096},
            "device": "a30",
            "latency_us_median": 10.0 + m * n * 4096 / 5e7,
            "status": "ok",
        }
        for m in range(1, 2000, 17)
        for n in (512, 1024, 4096)
    ]


def test_trainings_outlive_their_pods(
    pods: Pods, tmp_path: Path, catalog: CatalogService, address: str
) -> None:
    """Each makes one version of the models, that of one that nobody disturbed."""
    rows = MeasurementBatch(batch_index=0, rows=rows_to_table(_gemms()), is_last=True)
    run = Run(run_id="rows", kind=RunKind.IMPORT, tool="tests", content_hash="abc")
    list(catalog.record(run, [rows]))
    versions: list[str] = []
    with (
        _Fleet(pods, tmp_path, "predictor", address) as fleet,
        PredictorClient.connect(fleet.options) as client,
    ):

        def create(seed: int) -> Job:
            return client.create_training(TrainRequest(seed=seed))

        def check(job: Job) -> None:
            versions.append(client.get_training_report(job.job_id).model_version)

        _play(fleet, catalog, client, create, check)
        assert {model.version for model in client.list_models()} == set(versions)
        assert len(set(versions)) == len(versions)


def test_no_call_fails_while_pods_are_replaced(
    pods: Pods, tmp_path: Path, catalog: CatalogService, address: str
) -> None:
    """Two of two, one after the other, under load; a search that runs meanwhile goes on."""
    is_over, num_calls = threading.Event(), itertools.count()
    errors: list[str] = []
    with (
        _Fleet(pods, tmp_path, "simulator", address) as fleet,
        SimulatorClient.connect(fleet.options) as client,
    ):

        def ask() -> None:
            while not is_over.is_set():
                try:
                    client.list_definitions("devices")
                    client.list_jobs()
                except ForetokenError as err:
                    errors.append(err.message)
                next(num_calls)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        job = client.create_training_search(_SEARCH)
        for pid in fleet.pids:
            fleet.end(pid, signal.SIGTERM)
        assert JobState.SUCCEEDED is wait_for_job(client, job).state
        is_over.set()
        for thread in threads:
            thread.join()
    assert [] == errors
    assert next(num_calls) > 0
    assert 0 == _record(catalog, "simulator", job.job_id).num_interruptions
