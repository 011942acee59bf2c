"""A call for the sake of another ends with it: through every service between, to the last one."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contract_fakes import FakeCatalog, FakePredictor, FakeSimulator
from loopback import serve

from foretoken.catalog import servicer as catalog_servicer
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient, PredictorClient, SimulatorClient
from foretoken.domain.call_scope import (
    beyond_call,
    call_scope,
    check_wanted,
    current_scope,
    within_call,
)
from foretoken.domain.definition import Definition
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.measurements.measurement import RunSummary
from foretoken.domain.ports import CatalogPort, PredictorPort
from foretoken.predictor import servicer as predictor_servicer
from foretoken.simulator import servicer as simulator_servicer

_LONG_S = 60.0


class _Catalog(FakeCatalog):
    """Works on a list while somebody wants it, and may end."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.has_ended = threading.Event()
        self.wanted_s = 0.0

    def list_runs(self) -> tuple[RunSummary, ...]:
        self.wanted_s = within_call(math.inf)
        self.has_begun.set()
        try:
            while not self.may_end.wait(0.01):
                check_wanted()
        finally:
            self.has_ended.set()
        return ()


class _Predictor(FakePredictor):
    def __init__(self, folder: Path, catalog: CatalogPort) -> None:
        super().__init__(folder)
        self._catalog = catalog

    def list_models(self) -> tuple[ModelVersion, ...]:
        self._catalog.list_runs()
        return ()


class _Simulator(FakeSimulator):
    def __init__(self, folder: Path, predictor: PredictorPort) -> None:
        super().__init__(folder, lambda _: None)
        self._predictor = predictor

    def list_definitions(self, _kind: str) -> tuple[Definition, ...]:
        self._predictor.list_models()
        return ()


@pytest.fixture
def catalog() -> _Catalog:
    return _Catalog()


@pytest.fixture
def options(tmp_path: Path, catalog: _Catalog) -> Iterator[ChannelOptions]:
    """How to reach a simulator over a predictor over the catalog, each behind gRPC."""
    with ExitStack() as stack:

        def reach(register: Any, port: Any, connect: Callable[[ChannelOptions], Any]) -> Any:
            return stack.enter_context(connect(stack.enter_context(serve(register, port))))

        far = reach(catalog_servicer.register, catalog, CatalogClient.connect)
        predictor = _Predictor(tmp_path / "p", far)
        near = reach(predictor_servicer.register, predictor, PredictorClient.connect)
        simulator = _Simulator(tmp_path / "s", near)
        yield stack.enter_context(serve(simulator_servicer.register, simulator))


def test_a_deadline_reaches_the_last_service(options: ChannelOptions, catalog: _Catalog) -> None:
    """Which would have more time from the service that calls it."""
    catalog.may_end.set()
    hasty = replace(options, deadline_s=options.deadline_s / 2)
    with SimulatorClient.connect(hasty) as client:
        client.list_definitions("devices")
    assert 0.0 < catalog.wanted_s < hasty.deadline_s


def test_leaving_reaches_the_last_service(options: ChannelOptions, catalog: _Catalog) -> None:
    client = SimulatorClient.connect(options)
    asking = threading.Thread(target=_ask, args=(client,))
    asking.start()
    assert catalog.has_begun.wait(_LONG_S)
    client.close()
    asking.join()
    assert catalog.has_ended.wait(_LONG_S)


def _ask(client: SimulatorClient) -> None:
    with pytest.raises((ServiceUnavailableError, ValueError)):
        client.list_definitions("devices")


def test_what_is_of_use_to_later_calls_goes_on() -> None:
    assert current_scope() is None
    assert _LONG_S == within_call(_LONG_S)
    check_wanted()
    with call_scope(0.0, lambda: True):
        assert 0.0 == within_call(_LONG_S)
        with pytest.raises(ServiceUnavailableError, match="deadline has passed"):
            check_wanted()
        with beyond_call():
            check_wanted()
            assert _LONG_S == within_call(_LONG_S)
        assert 0.0 == within_call(_LONG_S)
    with call_scope(None, lambda: False):
        assert _LONG_S == within_call(_LONG_S)
        with pytest.raises(ServiceUnavailableError, match="caller has left"):
            check_wanted()
