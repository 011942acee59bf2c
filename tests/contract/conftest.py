"""Every contract test runs twice: against the object itself, and against it behind gRPC."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from contract_reach import Reach
from loopback import serve

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.channel_options import ChannelOptions


@pytest.fixture(params=["embedded", "grpc"])
def reach(request: pytest.FixtureRequest) -> Iterator[Reach]:
    with ExitStack() as stack:

        def reach(
            port: Any,
            register: Callable[[grpc.Server, Any], None],
            connect: Callable[[ChannelOptions], Any],
        ) -> Any:
            if request.param == "embedded":
                return port
            options = stack.enter_context(serve(register, port))
            return stack.enter_context(connect(options))

        yield reach


@pytest.fixture
def catalog(catalog_path: str) -> Iterator[CatalogService]:
    """An empty catalog, for the services that need one."""
    service = CatalogService(CatalogConfig(path=catalog_path, num_threads=1))
    service.open()
    yield service
    service.close()
