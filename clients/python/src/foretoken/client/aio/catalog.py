"""The catalog as a remote service, for asyncio."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Self, TypeVar

import grpc
import pyarrow as pa

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from foretoken.client.aio.channel import AsyncConnection
from foretoken.client.aio.jobs import AsyncJobsClient
from foretoken.client.aio.recording import AsyncRunSender, Batches
from foretoken.client.catalog import encode_filter
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.jobs import MAX_PAGE_SIZE
from foretoken.client.uploading import Upload
from foretoken.domain.artifact import Artifact
from foretoken.domain.job import Job
from foretoken.domain.measurement import (
    BatchReceipt,
    CheckRequest,
    CompactReport,
    Coverage,
    MeasuredSubject,
    MeasurementFilter,
    PruneReport,
    PruneRequest,
    QualityReport,
    Run,
    RunSummary,
    Snapshot,
    SnapshotDiff,
    SqlQuery,
)
from foretoken.wire import codec, ipc

A = TypeVar("A")
Q = TypeVar("Q")


class AsyncCatalogClient(AsyncJobsClient):
    """`CatalogClient`, awaited."""

    def __init__(
        self,
        connection: AsyncConnection,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Keep the connection, which must be open."""
        stub = CatalogServiceStub(connection.channel)
        super().__init__(connection, stub, sleep)
        self._stub = stub

    @classmethod
    def connect(cls, target: str | ChannelOptions) -> Self:
        """Return a client of the catalog at an address."""
        return cls(AsyncConnection.to(target, "catalog"))

    async def record(self, run: Run, batches: Batches) -> AsyncIterator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        See `CatalogClient.record`.
        """
        sender = AsyncRunSender(self._connection, self._stub, run, self._sleep)
        try:
            async for receipt in sender.send_all(batches):
                yield receipt
        except BaseException:
            await sender.abandon()
            raise
        await sender.finish()

    async def read_measurements(self, selection: MeasurementFilter) -> pa.Table:
        """Return the selected rows in the stored schema."""
        request = catalog_pb2.ReadMeasurementsRequest(selection=encode_filter(selection))
        chunks = self._connection.stream(self._stub.ReadMeasurements, request)
        return ipc.read_chunks([chunk.arrow_ipc async for chunk in chunks])

    async def query_sql(self, query: SqlQuery) -> pa.Table:
        """Return the result of a read-only SQL query."""
        request = codec.encode(query, catalog_pb2.QuerySqlRequest)
        chunks = self._connection.stream(self._stub.QuerySql, request)
        return ipc.read_chunks([chunk.arrow_ipc async for chunk in chunks])

    async def describe_coverage(self) -> tuple[Coverage, ...]:
        """Return row counts per operator, device, dtype and phase."""
        request = catalog_pb2.DescribeCoverageRequest()
        answer = await self._connection.call(self._stub.DescribeCoverage, request)
        return tuple(codec.decode(entry, Coverage) for entry in answer.coverage)

    async def list_runs(self) -> tuple[RunSummary, ...]:
        """Return all runs, newest first."""
        request = catalog_pb2.ListRunsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListRuns, request)
        return tuple(
            [codec.decode(message, RunSummary) async for page in pages for message in page.runs]
        )

    async def list_devices(self) -> tuple[MeasuredSubject, ...]:
        """Return the devices that were measured, by name."""
        request = catalog_pb2.ListDevicesRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListDevices, request)
        return tuple(
            [codec.decode(one, MeasuredSubject) async for page in pages for one in page.devices]
        )

    async def list_models(self) -> tuple[MeasuredSubject, ...]:
        """Return the models whose layers were measured, by name."""
        request = catalog_pb2.ListModelsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListModels, request)
        return tuple(
            [codec.decode(one, MeasuredSubject) async for page in pages for one in page.models]
        )

    async def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        """Return the content hash of what the filter selects."""
        request = catalog_pb2.DescribeSnapshotRequest(selection=encode_filter(selection))
        answer = await self._scan(self._stub.DescribeSnapshot, request)
        return codec.decode(answer, Snapshot)

    async def create_snapshot(self, selection: MeasurementFilter, holder: str = "") -> Snapshot:
        """Keep what the filter selects now, on behalf of a holder if one is named."""
        request = catalog_pb2.CreateSnapshotRequest(
            selection=encode_filter(selection), holder=holder
        )
        answer = await self._scan(self._stub.CreateSnapshot, request)
        return codec.decode(answer, Snapshot)

    async def list_snapshots(self) -> tuple[Snapshot, ...]:
        """Return the stored snapshots, newest first."""
        request = catalog_pb2.ListSnapshotsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListSnapshots, request)
        return tuple(
            [codec.decode(one, Snapshot) async for page in pages for one in page.snapshots]
        )

    async def diff_snapshots(self, before: str, after: str) -> SnapshotDiff:
        """Return what the rows of two stored snapshots differ in."""
        request = catalog_pb2.DiffSnapshotsRequest(before=before, after=after)
        answer = await self._scan(self._stub.DiffSnapshots, request)
        return codec.decode(answer, SnapshotDiff)

    async def release_snapshot(self, content_hash: str, holder: str) -> Snapshot:
        """Take a holder from a snapshot; harmless when it does not hold it."""
        request = catalog_pb2.ReleaseSnapshotRequest(content_hash=content_hash, holder=holder)
        answer = await self._connection.call(self._stub.ReleaseSnapshot, request)
        return codec.decode(answer, Snapshot)

    async def delete_snapshot(self, content_hash: str) -> None:
        """Forget a snapshot that nothing holds; its rows stay until they are pruned."""
        request = catalog_pb2.DeleteSnapshotRequest(content_hash=content_hash)
        await self._connection.call(self._stub.DeleteSnapshot, request)

    async def store_artifact(
        self, artifact: Artifact, content: Iterable[bytes] | AsyncIterable[bytes]
    ) -> Artifact:
        """Keep a file; the same name and content again changes nothing."""
        upload = Upload(artifact)
        with upload.telling():
            answer = await self._connection.ask(
                lambda left_s: self._stub.StoreArtifact(
                    upload.messages_async(content), timeout=left_s
                ),
                self._connection.options.stream_deadline_s,
                is_repeatable=not isinstance(content, Iterator | AsyncIterator),
            )
        return codec.decode(answer, Artifact)

    async def read_artifact(self, kind: str, name: str) -> AsyncIterator[bytes]:
        """Yield a file's content, in pieces."""
        request = catalog_pb2.ReadArtifactRequest(kind=kind, name=name)
        async for chunk in self._connection.stream(self._stub.ReadArtifact, request):
            yield chunk.content

    async def list_artifacts(self, kind: str) -> tuple[Artifact, ...]:
        """Return what is kept of a kind, newest first."""
        request = catalog_pb2.ListArtifactsRequest(kind=kind)
        pages = self._connection.pages(self._stub.ListArtifacts, request)
        return tuple(
            [codec.decode(one, Artifact) async for page in pages for one in page.artifacts]
        )

    async def activate_artifact(self, kind: str, name: str) -> Artifact:
        """Make this the active one of its kind."""
        request = catalog_pb2.ActivateArtifactRequest(kind=kind, name=name)
        answer = await self._connection.call(self._stub.ActivateArtifact, request)
        return codec.decode(answer, Artifact)

    async def delete_artifact(self, kind: str, name: str) -> None:
        """Forget a file that is not active."""
        request = catalog_pb2.DeleteArtifactRequest(kind=kind, name=name)
        await self._connection.call(self._stub.DeleteArtifact, request)

    async def create_check(self, request: CheckRequest) -> Job:
        """Start judging stored rows again, all batches and runs together."""
        message = codec.encode(request, catalog_pb2.CreateCheckRequest)
        answer = await self._connection.call(self._stub.CreateCheck, message)
        return codec.decode(answer, Job)

    async def get_check_report(self, job_id: str) -> QualityReport:
        """Return the result of a finished check."""
        request = catalog_pb2.GetCheckReportRequest(job_id=job_id)
        answer = await self._connection.call(self._stub.GetCheckReport, request)
        return codec.decode(answer, QualityReport)

    async def backup(self) -> AsyncIterator[bytes]:
        """Yield a copy of the catalog as it is now, in pieces."""
        request = catalog_pb2.BackupRequest()
        async for chunk in self._connection.stream(self._stub.Backup, request):
            yield chunk.content

    async def prune(self, request: PruneRequest) -> PruneReport:
        """Delete old runs, but none that a snapshot needs."""
        message = codec.encode(request, catalog_pb2.PruneRequest)
        answer = await self._scan(self._stub.Prune, message)
        return codec.decode(answer, PruneReport)

    async def compact(self) -> CompactReport:
        """Write the catalog's files anew without the room that deleted rows left."""
        request = catalog_pb2.CompactRequest()
        answer = await self._scan(self._stub.Compact, request)
        return codec.decode(answer, CompactReport)

    async def _scan(self, method: "grpc.aio.UnaryUnaryMultiCallable[Q, A]", request: Q) -> A:
        """Return the answer to a request with much to read: it may take as long as a stream."""
        deadline_s = self._connection.options.stream_deadline_s
        return await self._connection.call(method, request, deadline_s)
