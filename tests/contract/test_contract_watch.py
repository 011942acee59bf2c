"""What can happen to a remote watch: the client leaves, the service restarts, too many watch."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from contract_fakes import FakeSimulator
from contract_scenarios import SERVING, SERVING_REPORT

from foretoken.api.simulator.v1.simulator_service_pb2 import WatchTrainingSearchRequest
from foretoken.api.simulator.v1.simulator_service_pb2_grpc import SimulatorServiceStub
from foretoken.client.aio.simulator import AsyncSimulatorClient
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.simulator import SimulatorClient
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.job import Job, JobState
from foretoken.domain.job_runner import JobProgress
from foretoken.simulator.servicer import SERVICE, SimulatorServicer
from foretoken.wire.serving import MAX_WATCHES, register_service


class _House:
    """A simulator service that can be stopped and started again at its address."""

    def __init__(self, folder: Path) -> None:
        self.may_end = threading.Event()
        self.simulator = FakeSimulator(folder, self._work)
        self.simulator.open()
        self.servicer = SimulatorServicer(self.simulator)
        self.port = 0

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(12))
        register_service(self._server, SERVICE, self.servicer)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def close(self) -> None:
        self.may_end.set()
        self.stop()
        self.simulator.close()

    def options(self, max_reconnects: int = 20) -> ChannelOptions:
        return ChannelOptions(
            address=f"127.0.0.1:{self.port}",
            max_reconnects=max_reconnects,
            reconnect_delay_s=0.02,
        )

    def connect(self, max_reconnects: int = 20) -> SimulatorClient:
        return SimulatorClient.connect(self.options(max_reconnects))

    def _work(self, progress: JobProgress) -> object:
        while not self.may_end.wait(0.01):
            progress.update(0.5, "waiting")
        return SERVING_REPORT


@pytest.fixture
def house(tmp_path: Path) -> Iterator[_House]:
    house = _House(tmp_path)
    house.start()
    yield house
    house.close()


def _free_watches(
    servicer: SimulatorServicer, wanted: int = MAX_WATCHES, patience_s: float = 10.0
) -> int:
    """How many more may watch, once the server noticed who came and left."""
    deadline = time.monotonic() + patience_s
    while servicer._watches._value != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return servicer._watches._value


def test_a_client_that_leaves_frees_the_watch(house: _House) -> None:
    """The server must not keep a thread for nobody, though the job never changes."""
    with house.connect() as client:
        job = client.create_serving_simulation(SERVING)
        for _ in range(40):
            watch = client.watch_job(job.job_id)
            assert next(watch).job_id == job.job_id
            watch.close()  # type: ignore[attr-defined]
        assert _free_watches(house.servicer) == MAX_WATCHES


def test_clients_that_leave_a_search_free_its_threads(house: _House) -> None:
    """Though the search finds nothing more: there are more of them than the server has threads."""
    with house.connect() as client, grpc.insecure_channel(house.options().address) as channel:
        job = client.create_serving_simulation(SERVING)
        stub = SimulatorServiceStub(channel)
        for _ in range(4 * MAX_WATCHES):
            calls = [
                stub.WatchTrainingSearch(WatchTrainingSearchRequest(job_id=job.job_id))
                for _ in range(MAX_WATCHES)
            ]
            assert _free_watches(house.servicer, wanted=0) == 0
            for call in calls:
                call.cancel()
            assert _free_watches(house.servicer) == MAX_WATCHES
        assert client.get_job(job.job_id).state is JobState.RUNNING


def test_a_watch_survives_a_restart(house: _House) -> None:
    with house.connect() as client:
        job = client.create_serving_simulation(SERVING)
        watch = client.watch_job(job.job_id)
        seen = [next(watch)]
        house.stop()
        house.start()
        house.may_end.set()
        seen += list(watch)
    assert seen[-1].state is JobState.SUCCEEDED
    assert len(seen) == len(set(seen))


def test_an_awaited_watch_survives_a_restart(house: _House) -> None:
    async def play() -> list[Job]:
        async with AsyncSimulatorClient.connect(house.options()) as client:
            job = await client.create_serving_simulation(SERVING)
            watch = client.watch_job(job.job_id)
            seen = [await anext(watch)]
            await asyncio.to_thread(house.stop)
            await asyncio.to_thread(house.start)
            house.may_end.set()
            return [*seen, *[state async for state in watch]]

    seen = asyncio.run(play())
    assert seen[-1].state is JobState.SUCCEEDED
    assert len(seen) == len(set(seen))


def test_a_watch_gives_up_when_the_service_stays_away(house: _House) -> None:
    with house.connect(max_reconnects=1) as client:
        job = client.create_serving_simulation(SERVING)
        watch = client.watch_job(job.job_id)
        next(watch)
        house.stop()
        with pytest.raises(ServiceUnavailableError):
            list(watch)


def test_more_watchers_than_streams_still_see_the_end(house: _House) -> None:
    """The service spares some threads for other calls; the rest ask for the state."""
    num_watchers = MAX_WATCHES + 3
    with house.connect() as client, ThreadPoolExecutor(num_watchers) as pool:
        job = client.create_serving_simulation(SERVING)
        ends = [
            pool.submit(lambda: list(client.watch_job(job.job_id))[-1].state)
            for _ in range(num_watchers)
        ]
        time.sleep(0.2)
        assert client.get_job(job.job_id).state is JobState.RUNNING
        house.may_end.set()
        assert [end.result(10) for end in ends] == [JobState.SUCCEEDED] * num_watchers
