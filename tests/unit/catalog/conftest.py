"""An open catalog in a temporary folder."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService

_START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def clock() -> Callable[[], datetime]:
    """A clock that gains a minute at every look."""
    looks = iter(range(1_000_000))
    return lambda: _START + timedelta(minutes=next(looks))


@pytest.fixture
def catalog(catalog_path: str, clock: Callable[[], datetime]) -> Iterator[CatalogService]:
    config = CatalogConfig(path=catalog_path, num_threads=1)
    service = CatalogService(config, clock)
    service.open()
    yield service
    service.close()
