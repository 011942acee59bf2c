"""What a server does about calls that are too many, say nothing, or are no messages."""

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from contract_artifacts import make_artifact
from contract_fakes import FakeCatalog
from contract_rows import make_batches, make_rows, make_run
from loopback import serve
from prometheus_client import CollectorRegistry
from raw_calls import RawCalls

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from foretoken.api.types.v1 import measurement_pb2
from foretoken.app.config import ServerConfig
from foretoken.app.serve import new_server
from foretoken.catalog import servicer
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import AsyncCatalogClient, CatalogClient
from foretoken.domain.errors import InvalidRequestError, ServerBusyError
from foretoken.domain.measurements.measurement import (
    BatchReceipt,
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
    RunSummary,
)
from foretoken.wire import codec
from foretoken.wire.arrow import read_table

_SERVICE = "/foretoken.api.catalog.v1.CatalogService"
_LONG_S = 60.0


class _HeldCatalog(FakeCatalog):
    """Lists runs when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()
        self.num_asked = threading.Semaphore(0)

    def list_runs(self) -> tuple[RunSummary, ...]:
        self.num_asked.release()
        assert self.may_answer.wait(_LONG_S)
        return ()


@pytest.fixture
def catalog() -> Iterator[_HeldCatalog]:
    catalog = _HeldCatalog()
    yield catalog
    catalog.may_answer.set()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def _wait_for(sample: Callable[[], float | None], wanted: float) -> float | None:
    deadline = time.monotonic() + _LONG_S
    while sample() != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return sample()


def _value(registry: CollectorRegistry, metric: str, method: str, **labels: str) -> float | None:
    return registry.get_sample_value(
        f"foretoken_catalog_{metric}", {"method": method.rpartition("/")[2], **labels}
    )


def test_calls_beyond_budget_and_queue_are_refused_and_come_again(
    catalog: _HeldCatalog, registry: CollectorRegistry
) -> None:
    """One runs, one waits, and the third hears when to return; our client does, and is answered."""
    config = ServerConfig(budgets={"ListRuns": 1}, max_queued_calls=1, retry_after_s=0.05)

    def is_refused() -> float | None:
        return _value(registry, "refused_requests_total", "ListRuns")

    with serve(servicer.register, catalog, config, registry) as options:
        with CatalogClient.connect(options) as client, ThreadPoolExecutor(3) as pool:
            first = pool.submit(client.list_runs)
            assert catalog.num_asked.acquire(timeout=_LONG_S)
            others = [pool.submit(client.list_runs) for _ in range(2)]
            while not is_refused():
                assert not others[0].done()
                assert not others[1].done()
                time.sleep(0.01)
            # Another method has threads of its own.
            assert client.describe_coverage() == ()
            catalog.may_answer.set()
            assert [(), (), ()] == [one.result(_LONG_S) for one in (first, *others)]
        assert _value(registry, "requests_total", "ListRuns", code="RESOURCE_EXHAUSTED") == (
            is_refused()
        )


def test_a_call_that_is_refused_until_its_deadline_says_so(catalog: _HeldCatalog) -> None:
    """It ends at once where it would have to come again after that, however busy the machine is."""
    after_s = 2 * _LONG_S
    config = ServerConfig(budgets={"ListRuns": 1}, max_queued_calls=0, retry_after_s=after_s)
    with serve(servicer.register, catalog, config) as options, ThreadPoolExecutor(1) as pool:
        hasty = dataclasses.replace(options, deadline_s=_LONG_S)
        with CatalogClient.connect(options) as client, CatalogClient.connect(hasty) as other:
            first = pool.submit(client.list_runs)
            assert catalog.num_asked.acquire(timeout=_LONG_S)
            with pytest.raises(
                ServerBusyError, match="ListRuns: 1 of its calls run already"
            ) as caught:
                other.list_runs()
            assert caught.value.retry_after_s == after_s
            catalog.may_answer.set()
            assert first.result(_LONG_S) == ()


class _SlowRecording(FakeCatalog):
    """Keeps the first stream waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def record(self, run: Run, batches: Iterator[MeasurementBatch]) -> Iterator[BatchReceipt]:
        self.has_begun.set()
        assert self.may_go_on.wait(_LONG_S)
        return super().record(run, batches)


@pytest.mark.parametrize("num_batches", [3, 0])
def test_a_recording_that_is_refused_comes_again_and_is_stored_once(
    registry: CollectorRegistry, num_batches: int
) -> None:
    """With batches and without."""
    catalog = _SlowRecording()
    config = ServerConfig(budgets={"Record": 1}, retry_after_s=0.02)
    runs = [make_run("run-1"), make_run("run-2")]
    with (
        serve(servicer.register, catalog, config, registry) as options,
        CatalogClient.connect(dataclasses.replace(options, max_reconnects=1_000)) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(lambda: list(client.record(runs[0], make_batches(num_batches))))
        assert catalog.has_begun.wait(_LONG_S)
        second = pool.submit(lambda: list(client.record(runs[1], make_batches(num_batches))))
        while not _value(registry, "refused_requests_total", "Record"):
            assert not second.done()
            time.sleep(0.01)
        catalog.may_go_on.set()
        for one in (first, second):
            assert [False] * num_batches == [r.was_duplicate for r in one.result(_LONG_S)]
    assert sorted(catalog.batches) == [
        (run.run_id, index) for run in runs for index in range(num_batches)
    ]
    assert catalog.num_streams == 2


def test_an_awaited_recording_that_is_refused_comes_again(registry: CollectorRegistry) -> None:
    catalog = _SlowRecording()
    config = ServerConfig(budgets={"Record": 1}, retry_after_s=0.02)

    async def play(options: ChannelOptions) -> list[int]:
        patient = dataclasses.replace(options, max_reconnects=1_000)
        async with AsyncCatalogClient.connect(patient) as client:
            receipts = [r async for r in client.record(make_run("run-2"), make_batches(3))]
        return [receipt.batch_index for receipt in receipts]

    with (
        serve(servicer.register, catalog, config, registry) as options,
        CatalogClient.connect(options) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(lambda: list(client.record(make_run("run-1"), make_batches(1))))
        assert catalog.has_begun.wait(_LONG_S)
        second = pool.submit(lambda: asyncio.run(play(options)))
        while not _value(registry, "refused_requests_total", "Record"):
            assert not second.done()
            time.sleep(0.01)
        catalog.may_go_on.set()
        assert second.result(_LONG_S) == [0, 1, 2]
        assert len(first.result(_LONG_S)) == 1
    assert len(catalog.batches) == 4


def test_an_upload_that_is_refused_comes_again(registry: CollectorRegistry) -> None:
    """From its beginning."""
    config = ServerConfig(budgets={"StoreArtifact": 1}, retry_after_s=0.02)
    content = [b"one" * 1_000, b"two"]
    artifact = make_artifact("v1", b"".join(content))
    with (
        serve(servicer.register, FakeCatalog(), config, registry) as options,
        CatalogClient.connect(options) as client,
        grpc.insecure_channel(options.address) as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        raw = RawCalls(channel)
        raw.open_silent(f"{_SERVICE}/StoreArtifact")
        assert (
            _wait_for(lambda: _value(registry, "requests_in_flight", "StoreArtifact"), 1.0) == 1.0
        )
        upload = pool.submit(client.store_artifact, artifact, content)
        while not _value(registry, "refused_requests_total", "StoreArtifact"):
            assert not upload.done()
            time.sleep(0.01)
        raw.close()
        assert upload.result(_LONG_S) == artifact
        assert b"".join(client.read_artifact(artifact.kind, "v1")) == b"".join(content)


@pytest.mark.parametrize("method", ["Record", "StoreArtifact"])
def test_a_stream_that_says_nothing_is_ended_with_a_reason(
    registry: CollectorRegistry, method: str
) -> None:
    """Its thread is given back: there is one only, and the next stream gets it."""
    config = ServerConfig(budgets={method: 1}, first_message_s=0.05)
    with (
        serve(servicer.register, FakeCatalog(), config, registry) as options,
        grpc.insecure_channel(options.address) as channel,
    ):
        raw = RawCalls(channel)
        for _ in range(3):
            call = raw.open_silent(f"{_SERVICE}/{method}")
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "nothing came over it for 0.05 s" in call.details()
            assert _wait_for(lambda: _value(registry, "requests_in_flight", method), 0.0) == 0.0
        raw.close()


@pytest.mark.parametrize("method", ["Record", "StoreArtifact", "DescribeCoverage"])
def test_a_client_that_leaves_is_no_error_of_the_service(
    registry: CollectorRegistry, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is its leaving logged with a traceback: the audit's line is all."""
    with (
        serve(servicer.register, FakeCatalog(), None, registry) as options,
        grpc.insecure_channel(options.address) as channel,
        caplog.at_level(logging.INFO),
    ):
        raw = RawCalls(channel)
        raw.open_silent(f"{_SERVICE}/{method}")
        assert _wait_for(lambda: _value(registry, "requests_in_flight", method), 1.0) == 1.0
        raw.close()
        assert _wait_for(lambda: _value(registry, "requests_in_flight", method), 0.0) == 0.0
    assert {"foretoken.audit"} >= {record.name for record in caplog.records}


def test_a_recording_that_measures_long_is_taken_up_again(catalog: _HeldCatalog) -> None:
    """Its stream is ended between two batches, and none is lost or stored twice."""
    config = ServerConfig(stream_idle_s=0.05)

    def measure() -> Iterator[MeasurementBatch]:
        for number, batch in enumerate(make_batches(3), start=1):
            yield batch
            deadline = time.monotonic() + _LONG_S
            while catalog.num_open_streams and number < 3 and time.monotonic() < deadline:
                time.sleep(0.01)

    with (
        serve(servicer.register, catalog, config) as options,
        CatalogClient.connect(options) as client,
    ):
        receipts = list(client.record(make_run(kind=RunKind.PROFILE), measure()))
    assert [0, 1, 2] == [receipt.batch_index for receipt in receipts]
    assert 3 == len(catalog.batches)
    # More where the machine is so busy that a batch is on its way for as long.
    assert catalog.num_streams >= 3


def test_a_single_message_that_never_comes_is_not_waited_for(
    catalog: _HeldCatalog, registry: CollectorRegistry
) -> None:
    config = ServerConfig(budgets={"DescribeCoverage": 1}, max_queued_calls=0, first_message_s=0.05)
    with serve(servicer.register, catalog, config, registry) as options:
        with grpc.insecure_channel(options.address) as channel:
            raw = RawCalls(channel)
            call = raw.open_silent(f"{_SERVICE}/DescribeCoverage")
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() is grpc.StatusCode.CANCELLED
            raw.close()
        with CatalogClient.connect(options) as client:
            assert client.describe_coverage() == ()


def test_a_client_that_stops_reading_gives_its_thread_back(registry: CollectorRegistry) -> None:
    """An answer of 20 MB, of which it takes the first message."""
    catalog = FakeCatalog()
    rows = make_rows(range(1, 50_001))
    config = ServerConfig(budgets={"ReadMeasurements": 1}, stream_idle_s=0.3)
    with (
        serve(servicer.register, catalog, config, registry) as options,
        CatalogClient.connect(options) as client,
        grpc.insecure_channel(options.address) as channel,
    ):
        for run_id, sent in (("run-1", rows), ("run-2", rows[:1])):
            batch = MeasurementBatch(batch_index=0, rows=sent, is_last=True)
            list(client.record(make_run(run_id), [batch]))
        selection = MeasurementFilter(run_id="run-1")
        request = catalog_pb2.ReadMeasurementsRequest(
            selection=codec.encode(selection, measurement_pb2.MeasurementFilter)
        )
        call = CatalogServiceStub(channel).ReadMeasurements(request)
        next(call)
        in_flight = _wait_for(
            lambda: _value(registry, "requests_in_flight", "ReadMeasurements"), 0.0
        )
        assert in_flight == 0.0
        other = MeasurementFilter(run_id="run-2")
        assert read_table(client.read_measurements(other)) == rows[:1]


def test_old_connections_are_left_and_no_call_fails() -> None:
    """So that clients which began before a pod was added find it."""
    peers: set[str] = set()

    class _Peers(servicer.CatalogServicer):
        def describe_coverage(self, request: object, context: grpc.ServicerContext) -> object:  # type: ignore[override]
            peers.add(context.peer())
            return super().describe_coverage(request, context)  # type: ignore[arg-type]

    def register(server: grpc.Server, port: FakeCatalog) -> None:
        servicer.register_service(server, servicer.SERVICE, _Peers(port))  # type: ignore[arg-type]

    config = ServerConfig(max_connection_age_s=0.2, connection_grace_s=60.0)
    with (
        serve(register, FakeCatalog(), config) as options,
        CatalogClient.connect(options) as client,
    ):
        deadline = time.monotonic() + _LONG_S
        while len(peers) < 3 and time.monotonic() < deadline:
            assert client.describe_coverage() == ()
    assert len(peers) >= 3


def test_a_budget_of_no_method_is_refused() -> None:
    budgets = {"Recrd": 1}
    with (
        pytest.raises(InvalidRequestError, match="near are Record") as caught,
        ExitStack() as stack,
    ):
        new_server(ServerConfig(budgets=budgets), CollectorRegistry(), stack)
    assert ["server.budgets.Recrd"] == [v.field for v in caught.value.violations]
