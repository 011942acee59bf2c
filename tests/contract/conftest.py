"""Every contract test runs twice: against the object itself, and against it behind gRPC.

The way through gRPC ends at the object too: `make test` takes that one, `make test-slow` the other.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from contract_reach import Reach
from loopback import serve

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.channel_options import ChannelOptions

_WAYS = (pytest.param("embedded", marks=pytest.mark.slow), "grpc")


@contextmanager
def _reaching(way: str) -> Iterator[Reach]:
    with ExitStack() as stack:

        def reach(
            port: Any,
            register: Callable[[grpc.Server, Any], None],
            connect: Callable[[ChannelOptions], Any],
        ) -> Any:
            if way == "embedded":
                return port
            options = stack.enter_context(serve(register, port))
            return stack.enter_context(connect(options))

        yield reach


@pytest.fixture(params=_WAYS)
def reach(request: pytest.FixtureRequest) -> Iterator[Reach]:
    with _reaching(request.param) as reach:
        yield reach


@pytest.fixture(scope="module", params=_WAYS)
def shared_reach(request: pytest.FixtureRequest) -> Iterator[Reach]:
    """The same for what a module's tests only read."""
    with _reaching(request.param) as reach:
        yield reach


@contextmanager
def _open(path: str) -> Iterator[CatalogService]:
    service = CatalogService(CatalogConfig(path=path, num_threads=1))
    service.open()
    yield service
    service.close()


@pytest.fixture
def catalog(catalog_path: str) -> Iterator[CatalogService]:
    """An empty catalog, for the services that need one."""
    with _open(catalog_path) as service:
        yield service


@pytest.fixture(scope="module")
def shared_catalog(
    tmp_path_factory: pytest.TempPathFactory, make_catalog_path: Callable[[Path], str]
) -> Iterator[CatalogService]:
    """A catalog that a module fills once and its tests only read."""
    with _open(make_catalog_path(tmp_path_factory.mktemp("shared"))) as service:
        yield service
