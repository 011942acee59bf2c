"""Kept results are listed and read alike by both clients of a catalog."""

import asyncio
import hashlib
import json
from collections.abc import Iterator

import pytest
from contract_fakes import FakeCatalog
from contract_scenarios import TRAINING_REPORT
from loopback import serve

from foretoken.catalog import servicer
from foretoken.client import results
from foretoken.client.aio import results as aio_results
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import AsyncCatalogClient, CatalogClient
from foretoken.domain import schema
from foretoken.domain.errors import UnknownJobError
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.results.result import RESULT_ARTIFACT, KeptResult
from foretoken.wire.result_file import pack_report

_IDS = ("training-0a1b", "training-0a2c", "training-ffff")


@pytest.fixture
def catalog() -> FakeCatalog:
    """A catalog with a result of every id, each a minute after the one before."""
    fake = FakeCatalog()
    content = pack_report(TRAINING_REPORT)
    for place, job_id in enumerate(_IDS):
        created_at = f"2026-01-01T00:{place:02}:00+00:00"
        known = KeptResult(job_id=job_id, kind="training", title="t", created_at=created_at)
        artifact = Artifact(
            kind=RESULT_ARTIFACT,
            name=job_id,
            content_hash=hashlib.sha256(content).hexdigest(),
            num_bytes=len(content),
            created_at=created_at,
            metadata_json=json.dumps(schema.encode(known)),
        )
        fake.store_artifact(artifact, (content,))
    return fake


@pytest.fixture
def options(catalog: FakeCatalog) -> Iterator[ChannelOptions]:
    with serve(servicer.register, catalog) as options:
        yield options


def test_both_clients_read_the_same(options: ChannelOptions) -> None:
    async def play() -> tuple[object, ...]:
        async with AsyncCatalogClient.connect(options) as client:
            return (
                await aio_results.list_results(client),
                await aio_results.find_result(client, "latest~1"),
                await aio_results.read_result(client, "0a1b"),
                results.open_result(await aio_results.export_result(client, "0a1b")),
            )

    with CatalogClient.connect(options) as client:
        expected = (
            results.list_results(client),
            results.find_result(client, "latest~1"),
            results.read_result(client, "0a1b"),
            results.open_result(results.export_result(client, "0a1b")),
        )
    assert expected == asyncio.run(play())
    assert [result.job_id for result in expected[0]] == list(reversed(_IDS))
    assert expected[2][1] == TRAINING_REPORT


def test_what_is_deleted_is_gone_and_what_is_not_there_is_told(options: ChannelOptions) -> None:
    async def play() -> KeptResult:
        async with AsyncCatalogClient.connect(options) as client:
            with pytest.raises(UnknownJobError, match="unknown result"):
                await aio_results.read_result(client, "serving-1")
            return await aio_results.delete_result(client, "latest")

    deleted = asyncio.run(play())
    with CatalogClient.connect(options) as client:
        assert [deleted.job_id] == [
            job_id
            for job_id in _IDS
            if job_id not in {result.job_id for result in results.list_results(client)}
        ]
