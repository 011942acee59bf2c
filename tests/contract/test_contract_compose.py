"""A composition gives the same answers whether its services are embedded or behind gRPC."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from contract_rows import make_batches, make_run

from foretoken.app import front
from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig, EndpointsConfig, ServerConfig
from foretoken.app.serve import RunningServer, start_server
from foretoken.client.facade import Foretoken
from foretoken.client.services import SimulatorClient
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.workload import LengthSpec, WorkloadSpec

_NAMES = ("catalog", "predictor", "simulator")
_SERVER = ServerConfig(port=0, metrics_port=-1, grace_s=0.1)
_SERVING = ServingScenario(
    model=find_model("tiny-llama"),
    device="a30",
    workload=WorkloadSpec(rate_rps=50.0, num_requests=20, decode=LengthSpec(mean=16)),
    seed=3,
)
_TRAINING = TrainingScenario(model=find_model("tiny-llama"), device="a30", sequence_length=256)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = str(tmp_path_factory.mktemp("server"))
    running = start_server(_NAMES, AppConfig(home=home, server=_SERVER))
    yield running
    running.stop(_SERVER)


@pytest.fixture(scope="module")
def remote(server: RunningServer) -> Iterator[Foretoken]:
    endpoints = EndpointsConfig(**dict.fromkeys(_NAMES, f"127.0.0.1:{server.port}"))
    with Composition(AppConfig(home="/nowhere", endpoints=endpoints)) as composition:
        yield composition.foretoken(*_NAMES)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foretoken]:
    with front.open(str(tmp_path_factory.mktemp("embedded"))) as foretoken:
        yield foretoken


@pytest.fixture(scope="module", autouse=True)
def _same_rows(remote: Foretoken, embedded: Foretoken) -> None:
    for foretoken in (remote, embedded):
        foretoken.import_measurements(make_run(), make_batches(2, num_rows=20))
        foretoken.train()


def test_coverage_is_the_same(remote: Foretoken, embedded: Foretoken) -> None:
    assert embedded.coverage() == remote.coverage()
    assert [40] == [entry.num_rows for entry in remote.coverage()]


@pytest.mark.parametrize("m", [8, 33, 5000])
def test_estimates_are_the_same(remote: Foretoken, embedded: Foretoken, m: int) -> None:
    """A measured size, one near those, and one far beyond; only the models' names differ."""
    estimates = [
        foretoken.predict("gemm", device="a30", dtype=DType.BF16, m=m, n=4096, k=4096)
        for foretoken in (remote, embedded)
    ]
    first, *others = [replace(estimate, model_version="") for estimate in estimates]
    assert others == [first] * len(others)


def test_simulations_are_the_same(remote: Foretoken, embedded: Foretoken) -> None:
    serving = [
        replace(foretoken.simulate_serving(_SERVING), model_version="", job_id="")
        for foretoken in (remote, embedded)
    ]
    assert serving[0] == serving[1]
    assert serving[0].num_completed == 20
    steps = [
        replace(foretoken.simulate_training(_TRAINING), model_version="", job_id="")
        for foretoken in (remote, embedded)
    ]
    assert steps[0] == steps[1]
    assert steps[0].feasibility.is_feasible


def test_errors_are_the_same(remote: Foretoken, embedded: Foretoken) -> None:
    messages = set()
    for foretoken in (remote, embedded):
        with pytest.raises(UnknownDeviceError) as caught:
            foretoken.predict("gemm", device="a31", m=1, n=1, k=1)
        messages.add(caught.value.message)
    assert len(messages) == 1


def test_a_remote_port_is_a_client_and_opens_no_files(server: RunningServer) -> None:
    endpoints = EndpointsConfig(simulator=f"127.0.0.1:{server.port}")
    config = AppConfig(home="/nowhere", endpoints=endpoints)
    with Composition(config) as composition:
        assert isinstance(composition.simulator, SimulatorClient)
    assert not Path("/nowhere").exists()


def test_memory_is_planned_alike_and_opens_nothing(server: RunningServer, tmp_path: Path) -> None:
    endpoints = EndpointsConfig(simulator=f"127.0.0.1:{server.port}")
    with Composition(AppConfig(home="/nowhere", endpoints=endpoints)) as composition:
        remote = composition.plan_training_memory(_TRAINING)
    with Composition(AppConfig(home=str(tmp_path))) as composition:
        assert remote == composition.plan_training_memory(_TRAINING)
        with pytest.raises(UnknownDeviceError):
            composition.plan_training_memory(replace(_TRAINING, device="a31"))
    assert len(remote.memory) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_key_of_a_service_is_named(tmp_path: Path) -> None:
    config = AppConfig(home=str(tmp_path), catalog={"pth": "x"})
    with (
        Composition(config) as composition,
        pytest.raises(InvalidRequestError, match=r"catalog\.pth: unknown key"),
    ):
        composition.catalog  # noqa: B018 - opening is what is tested
