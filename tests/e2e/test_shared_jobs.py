"""Pods are killed in the middle of jobs: others go on with them, and each has one result.

`service_fleet.NUM_KILLS` is how often, of each kind of job.
"""

import itertools
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pods import Pods
from service_fleet import Fleet, free_port, play_with_kills, record_of

from foretoken.app.serve import serve_catalog_at
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.job_wait import wait_for_job
from foretoken.client.services import PredictorClient, SimulatorClient
from foretoken.domain import schema
from foretoken.domain.errors import ForetokenError
from foretoken.domain.job import Job, JobState
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import MeasurementBatch, Run, RunKind
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.wire.arrow import rows_to_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

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
    address = f"127.0.0.1:{free_port()}"
    with serve_catalog_at(address, catalog, grace_s=1.0):
        yield address


def test_searches_outlive_their_pods(
    pods: Pods, tmp_path: Path, catalog: CatalogService, address: str
) -> None:
    """Each has the report of one that nobody disturbed, and shows each finalist once."""
    with (
        Fleet(pods, tmp_path, "simulator", address) as fleet,
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

        play_with_kills(
            fleet, catalog, client, lambda _: client.create_training_search(_SEARCH), check
        )


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
        Fleet(pods, tmp_path, "predictor", address) as fleet,
        PredictorClient.connect(fleet.options) as client,
    ):

        def create(seed: int) -> Job:
            return client.create_training(TrainRequest(seed=seed))

        def check(job: Job) -> None:
            versions.append(client.get_training_report(job.job_id).model_version)

        play_with_kills(fleet, catalog, client, create, check)
        assert {model.version for model in client.list_models()} == set(versions)
        assert len(set(versions)) == len(versions)


def test_no_call_fails_while_pods_are_replaced(
    pods: Pods, tmp_path: Path, catalog: CatalogService, address: str
) -> None:
    """Two of two, one after the other, under load; a search that runs meanwhile goes on."""
    is_over, num_calls = threading.Event(), itertools.count()
    errors: list[str] = []
    with (
        Fleet(pods, tmp_path, "simulator", address) as fleet,
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

        with ThreadPoolExecutor(2) as threads:
            asking = [threads.submit(ask) for _ in range(2)]
            try:
                job = client.create_training_search(_SEARCH)
                for pid in fleet.pids:
                    fleet.end(pid, signal.SIGTERM)
                assert JobState.SUCCEEDED is wait_for_job(client, job).state
            finally:
                is_over.set()
        for asked in asking:
            asked.result()
    assert [] == errors
    assert next(num_calls) > 0
    assert 0 == record_of(catalog, "simulator", job.job_id).num_interruptions
