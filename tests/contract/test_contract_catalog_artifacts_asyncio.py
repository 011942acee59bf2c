"""The asyncio client of the catalog keeps files for other services as the plain one does."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from contract_artifacts import KIND, LARGE, SMALL, make_artifact
from loopback import serve

from foretoken.catalog import servicer
from foretoken.catalog.service import CatalogService
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import AsyncCatalogClient
from foretoken.domain.errors import ArtifactInUseError, InvalidRequestError

Ask = Callable[[AsyncCatalogClient], Coroutine[Any, Any, None]]


@pytest.fixture
def options(catalog: CatalogService) -> Iterator[ChannelOptions]:
    with serve(servicer.register, catalog) as options:
        yield options


def _ask(options: ChannelOptions, ask: Ask) -> None:
    async def run() -> None:
        async with AsyncCatalogClient.connect(options) as client:
            await ask(client)

    asyncio.run(run())


async def _give(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def test_asyncio_keeps_files_too(options: ChannelOptions) -> None:
    async def play(client: AsyncCatalogClient) -> None:
        first, second = make_artifact("v1", LARGE), make_artifact("v2", SMALL)
        assert first == await client.store_artifact(first, [LARGE])
        assert first == await client.store_artifact(first, [LARGE])
        assert second == await client.store_artifact(second, _give([SMALL]))
        assert (first, second) == await client.list_artifacts(KIND)
        pieces = [piece async for piece in client.read_artifact(KIND, "v1")]
        assert LARGE == b"".join(pieces)
        activated = await client.activate_artifact(KIND, "v1")
        assert replace(first, is_active=True) == activated
        with pytest.raises(ArtifactInUseError):
            await client.delete_artifact(KIND, "v1")
        await client.delete_artifact(KIND, "v2")
        assert (activated,) == await client.list_artifacts(KIND)

    _ask(options, play)


def test_asyncio_hears_why_a_file_is_refused(options: ChannelOptions) -> None:
    """While it still sends, and of whoever gives the content."""

    async def play(client: AsyncCatalogClient) -> None:
        short = make_artifact("v1", LARGE, num_bytes=10)
        with pytest.raises(InvalidRequestError, match="more content"):
            await client.store_artifact(short, [LARGE])

        def read() -> Iterator[bytes]:
            yield SMALL
            raise OSError("the file ended early")

        with pytest.raises(OSError, match="the file ended early"):
            await client.store_artifact(make_artifact("v1", LARGE), read())
        assert () == await client.list_artifacts(KIND)

    _ask(options, play)
