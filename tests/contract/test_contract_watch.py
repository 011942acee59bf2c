"""What can happen to a remote watch: clients leave, services restart, too many watch, no news."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from contract_fakes import FakeSimulator
from contract_scenarios import SERVING, SERVING_REPORT
from prometheus_client import CollectorRegistry

from foretoken.api.simulator.v1.simulator_service_pb2 import WatchTrainingSearchRequest
from foretoken.api.simulator.v1.simulator_service_pb2_grpc import SimulatorServiceStub
from foretoken.app.config import ServerConfig
from foretoken.app.serve import new_server
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import AsyncSimulatorClient, SimulatorClient
from foretoken.domain.errors import ServiceUnavailableError, StreamIdleError
from foretoken.domain.job import Job, JobState
from foretoken.jobs.runner import JobProgress
from foretoken.simulator import servicer
from foretoken.wire.errors import rpc_to_error

_MAX_WATCHES = 4
_BUDGETS = {"WatchJob": _MAX_WATCHES, "WatchTrainingSearch": _MAX_WATCHES}


class _House:
    """A simulator service that can be stopped and started again at its address."""

    def __init__(self, folder: Path) -> None:
        self.may_end = threading.Event()
        self.simulator = FakeSimulator(folder, self._work)
        self.simulator.open()
        self.port = 0

    def start(self, stream_idle_s: float = 60.0) -> None:
        self.registry, self._closing = CollectorRegistry(), ExitStack()
        config = ServerConfig(budgets=_BUDGETS, stream_idle_s=stream_idle_s, retry_after_s=0.02)
        self._server = new_server(config, self.registry, self._closing)
        servicer.register(self._server, self.simulator)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()
        self._closing.close()

    def num_open(self, method: str) -> float:
        return (
            self.registry.get_sample_value(
                "foretoken_simulator_requests_in_flight", {"method": method}
            )
            or 0.0
        )

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


def _wait_for_open(house: _House, method: str, wanted: int, patience_s: float = 60.0) -> float:
    """How many watch, once the server noticed who came and left."""
    deadline = time.monotonic() + patience_s
    while house.num_open(method) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return house.num_open(method)


def test_a_client_that_leaves_frees_the_watch(house: _House) -> None:
    """The server must not keep a thread for nobody, though the job never changes."""
    with house.connect() as client:
        job = client.create_serving_simulation(SERVING)
        for _ in range(40):
            watch = client.watch_job(job.job_id)
            assert next(watch).job_id == job.job_id
            watch.close()  # type: ignore[attr-defined]
        assert _wait_for_open(house, "WatchJob", 0) == 0


def test_clients_that_leave_a_search_free_its_threads(house: _House) -> None:
    """Though the search finds nothing more: there are more of them than the server has threads."""
    with house.connect() as client, grpc.insecure_channel(house.options().address) as channel:
        job = client.create_serving_simulation(SERVING)
        stub = SimulatorServiceStub(channel)
        for _ in range(4):
            calls = [
                stub.WatchTrainingSearch(WatchTrainingSearchRequest(job_id=job.job_id))
                for _ in range(_MAX_WATCHES)
            ]
            assert _wait_for_open(house, "WatchTrainingSearch", _MAX_WATCHES) == _MAX_WATCHES
            for call in calls:
                call.cancel()
            assert _wait_for_open(house, "WatchTrainingSearch", 0) == 0
        assert not client.get_job(job.job_id).state.is_final


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
    """The server refuses those beyond its budget, and they ask for the state."""
    num_watchers = _MAX_WATCHES + 3
    with house.connect() as client, ThreadPoolExecutor(num_watchers) as pool:
        job = client.create_serving_simulation(SERVING)
        ends = [
            pool.submit(lambda: list(client.watch_job(job.job_id))[-1].state)
            for _ in range(num_watchers)
        ]
        refused = ("foretoken_simulator_refused_requests_total", {"method": "WatchJob"})
        while (house.registry.get_sample_value(*refused) or 0) < num_watchers - _MAX_WATCHES:
            time.sleep(0.01)
        assert not client.get_job(job.job_id).state.is_final
        house.may_end.set()
        assert [end.result(60) for end in ends] == [JobState.SUCCEEDED] * num_watchers


def test_a_watch_without_news_is_ended_and_taken_up_again(house: _House) -> None:
    """The thread is given back, and the caller sees nothing of it."""
    house.stop()
    house.start(stream_idle_s=0.05)
    with house.connect() as client, grpc.insecure_channel(house.options().address) as channel:
        job = client.create_serving_simulation(SERVING)
        stub = SimulatorServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.WatchTrainingSearch(WatchTrainingSearchRequest(job_id=job.job_id)))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        error = rpc_to_error(caught.value, "simulator")
        assert type(error) is StreamIdleError
        assert "no news for 0.05 s" in error.message

        watch = client.watch_job(job.job_id)
        assert not next(watch).state.is_final
        ended = {"method": "WatchJob", "code": "DEADLINE_EXCEEDED"}
        rest: list[Job] = []
        reader = threading.Thread(target=lambda: rest.extend(watch))
        reader.start()
        while not house.registry.get_sample_value("foretoken_simulator_requests_total", ended):
            time.sleep(0.01)
        house.may_end.set()
        reader.join(30.0)
    assert rest[-1].state is JobState.SUCCEEDED
