"""The asyncio clients give the answers of the services behind them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from contract_fakes import FakeCatalog, FakePredictor, FakeProfiler, FakeSimulator
from contract_rows import make_batches, make_run
from contract_scenarios import SERVING, SERVING_REPORT, TRAINING, TRAINING_REPORT
from loopback import serve

from foretoken.catalog import servicer as catalog_servicer
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import (
    AsyncCatalogClient,
    AsyncPredictorClient,
    AsyncProfilerClient,
    AsyncSimulatorClient,
)
from foretoken.domain.errors import (
    CatalogBusyError,
    InvalidRequestError,
    RunConflictError,
    ServiceUnavailableError,
    UnknownDeviceError,
    UnknownJobError,
)
from foretoken.domain.job import Job, JobState
from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable
from foretoken.domain.measurements.latency_models import TrainRequest
from foretoken.domain.measurements.measurement import (
    BatchReceipt,
    MeasurementBatch,
    MeasurementFilter,
)
from foretoken.domain.measurements.profiling import ProfileReport, ProfileRequest
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.predictor import servicer as predictor_servicer
from foretoken.profiler import servicer as profiler_servicer
from foretoken.simulator import servicer as simulator_servicer

Scene = Callable[[Any], Coroutine[Any, Any, None]]


@pytest.fixture
def catalog() -> FakeCatalog:
    return FakeCatalog()


@pytest.fixture
def catalog_options(catalog: FakeCatalog) -> Iterator[ChannelOptions]:
    with serve(catalog_servicer.register, catalog) as options:
        yield options


@pytest.fixture
def predictor(tmp_path: Path) -> Iterator[FakePredictor]:
    fake = FakePredictor(tmp_path)
    fake.open()
    yield fake
    fake.close()


def _play(client_class: Any, options: ChannelOptions, scene: Scene) -> None:
    async def play() -> None:
        async with client_class.connect(options) as client:
            await scene(client)

    asyncio.run(play())


def test_catalog(catalog: FakeCatalog, catalog_options: ChannelOptions) -> None:
    async def scene(client: AsyncCatalogClient) -> None:
        receipts = [receipt async for receipt in client.record(make_run(), make_batches(2))]
        assert [receipt.batch_index for receipt in receipts] == [0, 1]
        rows = await client.read_measurements(MeasurementFilter(run_id="run-1"))
        assert rows == pa.concat_tables(catalog.batches.values())
        assert await client.list_runs() == catalog.list_runs()
        assert await client.describe_coverage() == ()
        selection = MeasurementFilter(operator="gemm")
        assert await client.describe_snapshot(selection) == catalog.describe_snapshot(selection)

    _play(AsyncCatalogClient, catalog_options, scene)


def test_a_lost_receipt_is_asked_for_again(
    catalog: FakeCatalog, catalog_options: ChannelOptions
) -> None:
    catalog.lost = [CatalogBusyError("busy")]

    async def batches() -> AsyncIterator[MeasurementBatch]:
        for batch in make_batches(2):
            await asyncio.sleep(0)
            yield batch

    async def scene(client: AsyncCatalogClient) -> None:
        receipts: list[BatchReceipt] = [r async for r in client.record(make_run(), batches())]
        assert [receipt.was_duplicate for receipt in receipts] == [True, False]

    _play(AsyncCatalogClient, catalog_options, scene)


@pytest.mark.parametrize("num_batches", [1, 200])
def test_errors_of_a_recording(
    num_batches: int, catalog: FakeCatalog, catalog_options: ChannelOptions
) -> None:
    """Also of a stream that more is being written to."""
    catalog.lost = [RunConflictError("other content")] * 3

    async def record(client: AsyncCatalogClient) -> None:
        async for _ in client.record(make_run(), make_batches(num_batches)):
            pass

    async def scene(client: AsyncCatalogClient) -> None:
        with pytest.raises(RunConflictError, match="other content"):
            await record(client)

    _play(AsyncCatalogClient, catalog_options, scene)


def test_predictor(predictor: FakePredictor) -> None:
    table = OperatorTable(
        operator="gemm", dtype=DType.FP16, columns={"m": np.arange(200_000), "n": [1] * 200_000}
    )

    async def scene(client: AsyncPredictorClient) -> None:
        reply = await client.predict(LatencyQuery(device="a30", tables=(table,)))
        assert len(reply.tables[0].latency_us) == 200_000
        assert len(predictor.queries) == 4
        job = await client.create_training(TrainRequest(device="a30", seed=7))
        states = [state async for state in client.watch_job(job.job_id)]
        assert states[-1].state is JobState.SUCCEEDED
        expected = PredictorTrainingReport(model_version="a30-7")
        assert await client.get_training_report(job.job_id) == expected
        assert await client.list_models() == ()

    with serve(predictor_servicer.register, predictor) as options:
        _play(AsyncPredictorClient, options, scene)


def test_profiler(tmp_path: Path) -> None:
    fake = FakeProfiler(tmp_path)
    fake.open()

    async def scene(client: AsyncProfilerClient) -> None:
        assert await client.list_local_devices() == ("cpu",)
        job = await client.create_profile(ProfileRequest(device="cpu"))
        last = [state async for state in client.watch_job(job.job_id)][-1]
        assert last == await client.get_job(job.job_id)
        assert await client.list_jobs() == (last,)
        assert await client.cancel_job(job.job_id) == last
        assert await client.get_profile_report(job.job_id) == ProfileReport(device="cpu")
        with pytest.raises(UnknownDeviceError, match="did you mean cpu"):
            await client.create_profile(ProfileRequest(device="cpux"))

    with serve(profiler_servicer.register, fake) as options:
        _play(AsyncProfilerClient, options, scene)
    fake.close()


def test_simulator(tmp_path: Path) -> None:
    outcomes = [SERVING_REPORT, TRAINING_REPORT]
    fake = FakeSimulator(tmp_path, lambda _: outcomes.pop(0))
    fake.open()

    async def wait(client: AsyncSimulatorClient, job: Job) -> None:
        states = [state async for state in client.watch_job(job.job_id)]
        assert states[-1].state is JobState.SUCCEEDED

    async def scene(client: AsyncSimulatorClient) -> None:
        job = await client.create_serving_simulation(SERVING)
        await wait(client, job)
        assert await client.get_serving_report(job.job_id) == SERVING_REPORT
        job = await client.create_training_simulation(TRAINING)
        await wait(client, job)
        assert await client.get_training_report(job.job_id) == TRAINING_REPORT
        assert fake.scenarios == [SERVING, TRAINING]
        with pytest.raises(UnknownJobError):
            await client.get_serving_report("nobody")

    with serve(simulator_servicer.register, fake) as options:
        _play(AsyncSimulatorClient, options, scene)
    fake.close()


def test_a_dead_address_says_what_to_do() -> None:
    async def scene(client: AsyncProfilerClient) -> None:
        with pytest.raises(ServiceUnavailableError, match="check the address"):
            await client.create_profile(ProfileRequest(device="cpu"))

    _play(AsyncProfilerClient, ChannelOptions(address="127.0.0.1:1"), scene)


def test_a_closed_client_says_so() -> None:
    async def scene(client: AsyncProfilerClient) -> None:
        await client.close()
        with pytest.raises(InvalidRequestError, match="not open"):
            await client.list_local_devices()

    _play(AsyncProfilerClient, ChannelOptions(address="127.0.0.1:1"), scene)
