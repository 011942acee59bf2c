"""Both clients of a service offer what its port does, under the same names."""

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from foretoken.client import results
from foretoken.client.aio import results as aio_results
from foretoken.client.services import (
    AsyncCatalogClient,
    AsyncPredictorClient,
    AsyncProfilerClient,
    AsyncSimulatorClient,
    CatalogClient,
    PredictorClient,
    ProfilerClient,
    SimulatorClient,
)
from foretoken.domain.ports import CatalogAdminPort, PredictorPort, ProfilerPort, SimulatorPort

_CLIENTS: Mapping[type, tuple[type, type]] = {
    CatalogAdminPort: (CatalogClient, AsyncCatalogClient),
    ProfilerPort: (ProfilerClient, AsyncProfilerClient),
    PredictorPort: (PredictorClient, AsyncPredictorClient),
    SimulatorPort: (SimulatorClient, AsyncSimulatorClient),
}


def _parameters(cls: type) -> dict[str, list[str]]:
    """Return the public methods of a class with the names of their parameters."""
    return {
        name: list(inspect.signature(member).parameters)
        for name, member in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


def _functions(module: Any) -> dict[str, list[str]]:
    """Return the public functions that a module itself defines, with their parameters."""
    return {
        name: list(inspect.signature(member).parameters)
        for name, member in inspect.getmembers(module, inspect.isfunction)
        if member.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.parametrize("port", _CLIENTS, ids=lambda port: port.__name__)
@pytest.mark.parametrize("place", [0, 1], ids=["synchronous", "asyncio"])
def test_a_client_has_every_method_of_its_port(port: type, place: int) -> None:
    offered = _parameters(_CLIENTS[port][place])
    wanted = _parameters(port)
    assert {"get_job", "watch_job"} < set(wanted)
    assert wanted == {name: offered.get(name) for name in wanted}


def test_results_are_read_the_same_way_with_asyncio() -> None:
    """What queries a catalog has an awaited twin."""
    asking = {name: names for name, names in _functions(results).items() if names[0] == "catalog"}
    assert {"list_results", "read_result"} <= set(asking)
    assert asking == _functions(aio_results)
