"""Fixtures every test may use."""

import functools
import gc
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from foretoken.jobs.process_setup import collect_rarely

if TYPE_CHECKING:
    from web_client import WebClient

# How long an example takes says how busy the machine is. Few examples where everybody waits for all
# tests; `make test-slow` draws more of them. Both draw the same at every run: a law that is false
# once in a thousand draws is found where somebody looks for it, not where another change lands.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=5)
settings.register_profile("slow", deadline=None, derandomize=True, max_examples=100)
# To look: make test-slow PYTEST_ARGS=--hypothesis-profile=fresh
settings.register_profile("fresh", deadline=None, derandomize=False, max_examples=100)
# Many more: pytest --hypothesis-profile=thorough tests/properties/test_...py
settings.register_profile("thorough", deadline=None, derandomize=False, max_examples=1_000)
settings.load_profile("suite")

# An empty home is empty: tests of the starter name it. What a test starts inherits this.
os.environ["FORETOKEN_PREDICTOR__STARTER"] = "''"
# A process more takes longer to start than most searches of tests do.
os.environ["FORETOKEN_SIMULATOR__NUM_SEARCH_WORKERS"] = "1"

_TESTS = Path(__file__).resolve().parent
# Folders whose tests do not run the serving engine.
_NEEDS_NO_ENGINE = tuple(
    _TESTS / "unit" / room
    for room in ("catalog", "client", "domain", "jobs", "page", "predictor", "profiler", "wire")
)
_SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the collector ten thousand tests and their modules: they stay as long as the process.

    Looking at them takes half a second each time. Afterwards it looks as rarely as a command does.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        collect_rarely()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave what reads the shared measurements to `make test-slow`: a clone alone has none."""
    if "shared_data" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each worker begin with tests that do not run the engine, as `make` compiles it meanwhile.

    A worker that comes to the engine before it is kept compiles it for itself, a minute long.
    Workers take even parts of the tests in their order.
    """
    groups: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])
    for item in items:
        groups[_needs_engine(item.path)].append(item)
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = [
        item
        for worker in range(num_workers)
        for group in groups
        for item in group[_share(group, worker, num_workers)]
    ]


@functools.cache
def _needs_engine(path: Path) -> bool:
    return not any(room in path.parents for room in _NEEDS_NO_ENGINE)


def _share(group: list[pytest.Item], worker: int, num_workers: int) -> slice:
    first, last = (len(group) * number // num_workers for number in (worker, worker + 1))
    return slice(first, last)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Measurements made by others on real GPUs; not part of the project."""
    if not _SHARED_DATA.is_dir():
        pytest.skip("the shared measurements (../shared/data) are not on this machine")
    return _SHARED_DATA


@pytest.fixture(scope="session")
def _opened_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from foretoken.catalog.config import CatalogConfig
    from foretoken.catalog.service import CatalogService

    folder = tmp_path_factory.mktemp("opened-catalog")
    service = CatalogService(CatalogConfig(path=str(folder / "catalog.duckdb"), num_threads=1))
    service.open()
    service.close()
    return folder


@pytest.fixture(scope="session")
def make_catalog_path(_opened_catalog: Path) -> Callable[[Path], str]:
    """Put an empty catalog into a folder: its tables take longer to make than most tests."""

    def make(folder: Path) -> str:
        shutil.copytree(_opened_catalog, folder, dirs_exist_ok=True)
        return str(folder / "catalog.duckdb")

    return make


@pytest.fixture
def catalog_path(tmp_path: Path, make_catalog_path: Callable[[Path], str]) -> str:
    """An empty catalog that has its tables."""
    return make_catalog_path(tmp_path)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[WebClient]":
    """A server of pages with a home of its own."""
    from web_client import serve_home

    with serve_home(tmp_path_factory.mktemp("home")) as client:
        yield client
