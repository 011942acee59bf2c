"""The asyncio client of the catalog answers as the plain one does, on a real catalog."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from contract_rows import make_batches, make_run
from loopback import serve

from foretoken.catalog import servicer
from foretoken.catalog.service import CatalogService
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import AsyncCatalogClient, CatalogClient
from foretoken.domain.measurements.measurement import (
    CheckRequest,
    MeasurementFilter,
    PruneRequest,
    SqlQuery,
)
from foretoken.domain.ports import CatalogAdminPort
from foretoken.wire.arrow import read_table

_ALL = MeasurementFilter()
Ask = Callable[[AsyncCatalogClient], Coroutine[Any, Any, Any]]


@pytest.fixture
def options(catalog: CatalogService) -> Iterator[ChannelOptions]:
    list(catalog.record(make_run(), make_batches(3)))
    with serve(servicer.register, catalog) as options:
        yield options


def _ask(options: ChannelOptions, ask: Ask) -> Any:
    async def run() -> Any:
        async with AsyncCatalogClient.connect(options) as client:
            return await ask(client)

    return asyncio.run(run())


def test_every_method_of_the_port_is_there() -> None:
    names = {name for name in dir(CatalogAdminPort) if not name.startswith("_")}
    for name in names:
        plain = inspect.signature(getattr(CatalogClient, name))
        awaited = inspect.signature(getattr(AsyncCatalogClient, name))
        assert list(plain.parameters) == list(awaited.parameters)


@pytest.mark.parametrize(
    "name",
    ["describe_coverage", "list_runs", "list_devices", "list_models", "list_snapshots"],
)
def test_lists(name: str, options: ChannelOptions) -> None:
    with CatalogClient.connect(options) as client:
        client.create_snapshot(_ALL, "somebody")
        expected = getattr(client, name)()
    assert expected == _ask(options, lambda client: getattr(client, name)())


def test_rows(options: ChannelOptions) -> None:
    query = SqlQuery(text="SELECT m FROM op_gemm ORDER BY m")
    with CatalogClient.connect(options) as client:
        rows = read_table(client.read_measurements(_ALL))
        answer = read_table(client.query_sql(query))
    assert rows == _ask(options, lambda client: client.read_measurements(_ALL))
    assert answer == _ask(options, lambda client: client.query_sql(query))


def test_snapshots(options: ChannelOptions) -> None:
    async def play(client: AsyncCatalogClient) -> None:
        first = await client.create_snapshot(_ALL, "somebody")
        narrow = await client.create_snapshot(MeasurementFilter(run_id="nobody"))
        diff = await client.diff_snapshots(first.content_hash, narrow.content_hash)
        assert [(0, 12)] == [(change.num_added, change.num_removed) for change in diff.changes]
        released = await client.release_snapshot(first.content_hash, "somebody")
        assert () == released.holders
        await client.delete_snapshot(narrow.content_hash)
        assert (released,) == await client.list_snapshots()

    _ask(options, play)


def test_upkeep(options: ChannelOptions) -> None:
    async def play(client: AsyncCatalogClient) -> None:
        job = await client.create_check(CheckRequest())
        *_, last = [state async for state in client.watch_job(job.job_id)]
        assert last.state.is_final
        assert 12 == (await client.get_check_report(job.job_id)).num_rows
        pieces = [piece async for piece in client.backup()]
        assert sum(map(len, pieces)) > 4096
        pruned = await client.prune(PruneRequest(older_than_days=0.0))
        assert ("run-1",) == pruned.deleted_run_ids
        assert (await client.compact()).bytes_after > 0

    _ask(options, play)
