"""Every error of the domain reaches the caller of a remote service as itself."""

import dataclasses
import inspect
import logging
from collections.abc import Iterator

import grpc
import pytest
from contract_scenarios import SERVING
from loopback import serve

from foretoken.client.services import SimulatorClient
from foretoken.domain import errors
from foretoken.domain.errors import (
    FieldViolation,
    ForetokenError,
    InvalidRequestError,
    ServerBusyError,
    ServiceUnavailableError,
    UnknownModelError,
)
from foretoken.domain.job import Job
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator import servicer
from foretoken.wire.errors import STATUS_BY_ERROR

_LONG_S = 60.0
_CLASSES = sorted(
    (
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, ForetokenError) and not cls.__name__.startswith("_")
    ),
    key=lambda cls: cls.__name__,
)


class _Raising:
    """A port of which every call ends with the same error."""

    error: Exception = ForetokenError("nothing")

    def get_job(self, job_id: str) -> Job:
        del job_id
        raise self.error

    def create_serving_simulation(self, scenario: ServingScenario) -> Job:
        del scenario
        raise self.error


@pytest.fixture(scope="module")
def port() -> _Raising:
    return _Raising()


@pytest.fixture(scope="module")
def client(port: _Raising) -> Iterator[SimulatorClient]:
    with (
        serve(servicer.register, port) as options,
        SimulatorClient.connect(dataclasses.replace(options, deadline_s=_LONG_S)) as client,
    ):
        yield client


def test_the_table_has_every_error_and_no_other() -> None:
    assert set(_CLASSES) == set(STATUS_BY_ERROR)


def test_reasons_are_unique() -> None:
    """The reason alone selects the class on the other side."""
    reasons = [cls.reason for cls in _CLASSES]
    assert len(reasons) == len(set(reasons))


def _new(cls: type[ForetokenError], message: str, **details: str) -> ForetokenError:
    """Return an error; a busy server wants its callers back after their deadline."""
    if issubclass(cls, ServerBusyError):
        return cls(message, 2 * _LONG_S, **details)
    return cls(message, **details)


@pytest.mark.parametrize("cls", _CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_survives_the_wire(
    cls: type[ForetokenError], port: _Raising, client: SimulatorClient
) -> None:
    port.error = _new(cls, "what to do: größer wählen", name="a", near="b,c")
    with pytest.raises(ForetokenError) as caught:
        client.create_serving_simulation(SERVING)
    assert type(caught.value) is cls
    assert caught.value.message == port.error.message
    assert caught.value.details == {"name": "a", "near": "b,c"}


def test_violations_survive_the_wire(port: _Raising, client: SimulatorClient) -> None:
    violations = (FieldViolation("a.b", "must be positive"), FieldViolation("c", "is missing"))
    port.error = InvalidRequestError("two things", violations, path="scenario")
    with pytest.raises(InvalidRequestError) as caught:
        client.get_job("x")
    assert caught.value.violations == violations
    assert caught.value.details == {"path": "scenario"}


def test_the_near_names_survive_the_wire(port: _Raising, client: SimulatorClient) -> None:
    port.error = UnknownModelError.named("lama", ["llama", "qwen"])
    with pytest.raises(UnknownModelError, match="did you mean llama"):
        client.get_job("x")


def test_an_overlong_error_is_cut_and_not_lost(port: _Raising, client: SimulatorClient) -> None:
    """HTTP/2 refuses long trailers, and the caller would see another error."""
    many = [FieldViolation(f"rows[{index}]", "ä" * 5_000) for index in range(500)]
    port.error = InvalidRequestError("ä" * 100_000, many, where="ä" * 100_000)
    with pytest.raises(InvalidRequestError) as caught:
        client.get_job("x")
    assert caught.value.message.startswith("ää")
    assert 0 < len(caught.value.violations) < len(many)


def test_an_unexpected_error_is_internal_and_logged_with_its_id(
    port: _Raising, client: SimulatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller learns an id, not the service's inside."""
    port.error = ZeroDivisionError("secret path")
    with caplog.at_level(logging.ERROR), pytest.raises(ForetokenError) as caught:
        client.get_job("x")
    error_id = caught.value.details["error_id"]
    assert error_id in caught.value.message
    assert "secret" not in caught.value.message
    assert error_id in caplog.text
    assert "secret path" in caplog.text


def test_a_message_beyond_the_limit_says_so(client: SimulatorClient) -> None:
    scenario = dataclasses.replace(SERVING, name="x" * 17 * 2**20)
    with pytest.raises(InvalidRequestError, match="too large"):
        client.create_serving_simulation(scenario)


def test_a_dead_address_says_what_to_do() -> None:
    with SimulatorClient.connect("127.0.0.1:1") as client:
        with pytest.raises(ServiceUnavailableError, match=r"simulator at 127\.0\.0\.1:1") as caught:
            client.create_serving_simulation(SERVING)
        assert "check the address" in caught.value.message


def test_a_closed_client_says_so() -> None:
    other = SimulatorClient.connect("127.0.0.1:1")
    other.close()
    with pytest.raises(InvalidRequestError, match="not open"):
        other.get_job("x")


def test_a_service_that_is_not_there_is_named() -> None:
    """Another program listens at the address."""

    def register_nothing(_server: grpc.Server, _port: object) -> None:
        return None

    with (
        serve(register_nothing, None) as options,
        SimulatorClient.connect(options) as client,
        pytest.raises(ForetokenError, match="does not know this call"),
    ):
        client.get_job("x")
