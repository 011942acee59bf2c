"""The catalog as a remote service."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

import grpc
import pyarrow as pa

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from foretoken.api.types.v1 import measurement_pb2
from foretoken.client.channel import Connection
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.jobs import MAX_PAGE_SIZE, JobsClient
from foretoken.client.recording import RunSender
from foretoken.client.uploading import Upload
from foretoken.domain.artifact import Artifact
from foretoken.domain.job import Job
from foretoken.domain.measurement import (
    BatchReceipt,
    CheckRequest,
    CompactReport,
    Coverage,
    MeasuredSubject,
    MeasurementBatch,
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


class CatalogClient(JobsClient):
    """Implements `CatalogAdminPort` over a connection."""

    def __init__(self, connection: Connection, sleep: Callable[[float], None] = time.sleep) -> None:
        """Keep the connection, which must be open."""
        stub = CatalogServiceStub(connection.channel)
        super().__init__(connection, stub, sleep)
        self._stub = stub

    @classmethod
    def connect(cls, target: str | ChannelOptions) -> Self:
        """Return a client of the catalog at an address."""
        return cls(Connection.to(target, "catalog"))

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Iterator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        A profile's batch is asked for when the one before has its receipt; of an import two groups
        of batches at most are read ahead. Batches are asked for in the caller's thread. One whose
        receipt is lost is sent again over a new stream, which is harmless.
        """
        sender = RunSender(self._connection, self._stub, run, self._sleep)
        try:
            yield from sender.send_all(batches)
        except BaseException:
            sender.abandon()
            raise
        sender.finish()

    def read_measurements(self, selection: MeasurementFilter) -> pa.RecordBatchReader:
        """Return the selected rows in the stored schema, as they arrive."""
        request = catalog_pb2.ReadMeasurementsRequest(selection=encode_filter(selection))
        chunks = self._connection.stream(self._stub.ReadMeasurements, request)
        return ipc.open_chunks(chunk.arrow_ipc for chunk in chunks)

    def query_sql(self, query: SqlQuery) -> pa.RecordBatchReader:
        """Return the result of a read-only SQL query, as it arrives."""
        request = codec.encode(query, catalog_pb2.QuerySqlRequest)
        chunks = self._connection.stream(self._stub.QuerySql, request)
        return ipc.open_chunks(chunk.arrow_ipc for chunk in chunks)

    def describe_coverage(self) -> tuple[Coverage, ...]:
        """Return row counts per operator, device, dtype and phase."""
        request = catalog_pb2.DescribeCoverageRequest()
        answer = self._connection.call(self._stub.DescribeCoverage, request)
        return tuple(codec.decode(entry, Coverage) for entry in answer.coverage)

    def list_runs(self) -> tuple[RunSummary, ...]:
        """Return all runs, newest first."""
        request = catalog_pb2.ListRunsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListRuns, request)
        return tuple(codec.decode(message, RunSummary) for page in pages for message in page.runs)

    def list_devices(self) -> tuple[MeasuredSubject, ...]:
        """Return the devices that were measured, by name."""
        request = catalog_pb2.ListDevicesRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListDevices, request)
        return tuple(codec.decode(one, MeasuredSubject) for page in pages for one in page.devices)

    def list_models(self) -> tuple[MeasuredSubject, ...]:
        """Return the models whose layers were measured, by name."""
        request = catalog_pb2.ListModelsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListModels, request)
        return tuple(codec.decode(one, MeasuredSubject) for page in pages for one in page.models)

    def describe_snapshot(self, selection: MeasurementFilter) -> Snapshot:
        """Return the content hash of what the filter selects."""
        request = catalog_pb2.DescribeSnapshotRequest(selection=encode_filter(selection))
        answer = self._scan(self._stub.DescribeSnapshot, request)
        return codec.decode(answer, Snapshot)

    def create_snapshot(self, selection: MeasurementFilter, holder: str = "") -> Snapshot:
        """Keep what the filter selects now, on behalf of a holder if one is named."""
        request = catalog_pb2.CreateSnapshotRequest(
            selection=encode_filter(selection), holder=holder
        )
        answer = self._scan(self._stub.CreateSnapshot, request)
        return codec.decode(answer, Snapshot)

    def list_snapshots(self) -> tuple[Snapshot, ...]:
        """Return the stored snapshots, newest first."""
        request = catalog_pb2.ListSnapshotsRequest(page_size=MAX_PAGE_SIZE)
        pages = self._connection.pages(self._stub.ListSnapshots, request)
        return tuple(codec.decode(one, Snapshot) for page in pages for one in page.snapshots)

    def diff_snapshots(self, before: str, after: str) -> SnapshotDiff:
        """Return what the rows of two stored snapshots differ in."""
        request = catalog_pb2.DiffSnapshotsRequest(before=before, after=after)
        answer = self._scan(self._stub.DiffSnapshots, request)
        return codec.decode(answer, SnapshotDiff)

    def release_snapshot(self, content_hash: str, holder: str) -> Snapshot:
        """Take a holder from a snapshot; harmless when it does not hold it."""
        request = catalog_pb2.ReleaseSnapshotRequest(content_hash=content_hash, holder=holder)
        answer = self._connection.call(self._stub.ReleaseSnapshot, request)
        return codec.decode(answer, Snapshot)

    def delete_snapshot(self, content_hash: str) -> None:
        """Forget a snapshot that nothing holds; its rows stay until they are pruned."""
        request = catalog_pb2.DeleteSnapshotRequest(content_hash=content_hash)
        self._connection.call(self._stub.DeleteSnapshot, request)

    def store_artifact(self, artifact: Artifact, content: Iterable[bytes]) -> Artifact:
        """Keep a file; the same name and content again changes nothing.

        The content is asked for in a thread of gRPC's.
        """
        upload = Upload(artifact)
        with upload.telling():
            answer = self._connection.ask(
                lambda left_s: self._stub.StoreArtifact(upload.messages(content), timeout=left_s),
                self._connection.options.stream_deadline_s,
                is_repeatable=not isinstance(content, Iterator),
            )
        return codec.decode(answer, Artifact)

    def read_artifact(self, kind: str, name: str) -> Iterator[bytes]:
        """Yield a file's content, in pieces."""
        request = catalog_pb2.ReadArtifactRequest(kind=kind, name=name)
        for chunk in self._connection.stream(self._stub.ReadArtifact, request):
            yield chunk.content

    def list_artifacts(self, kind: str) -> tuple[Artifact, ...]:
        """Return what is kept of a kind, newest first."""
        request = catalog_pb2.ListArtifactsRequest(kind=kind)
        pages = self._connection.pages(self._stub.ListArtifacts, request)
        return tuple(codec.decode(one, Artifact) for page in pages for one in page.artifacts)

    def activate_artifact(self, kind: str, name: str) -> Artifact:
        """Make this the active one of its kind."""
        request = catalog_pb2.ActivateArtifactRequest(kind=kind, name=name)
        return codec.decode(self._connection.call(self._stub.ActivateArtifact, request), Artifact)

    def delete_artifact(self, kind: str, name: str) -> None:
        """Forget a file that is not active."""
        request = catalog_pb2.DeleteArtifactRequest(kind=kind, name=name)
        self._connection.call(self._stub.DeleteArtifact, request)

    def create_check(self, request: CheckRequest) -> Job:
        """Start judging stored rows again, all batches and runs together."""
        message = codec.encode(request, catalog_pb2.CreateCheckRequest)
        return codec.decode(self._connection.call(self._stub.CreateCheck, message), Job)

    def get_check_report(self, job_id: str) -> QualityReport:
        """Return the result of a finished check."""
        request = catalog_pb2.GetCheckReportRequest(job_id=job_id)
        answer = self._connection.call(self._stub.GetCheckReport, request)
        return codec.decode(answer, QualityReport)

    def backup(self) -> Iterator[bytes]:
        """Yield a copy of the catalog as it is now, in pieces."""
        request = catalog_pb2.BackupRequest()
        for chunk in self._connection.stream(self._stub.Backup, request):
            yield chunk.content

    def prune(self, request: PruneRequest) -> PruneReport:
        """Delete old runs, but none that a snapshot needs."""
        message = codec.encode(request, catalog_pb2.PruneRequest)
        answer = self._scan(self._stub.Prune, message)
        return codec.decode(answer, PruneReport)

    def compact(self) -> CompactReport:
        """Write the catalog's files anew without the room that deleted rows left."""
        request = catalog_pb2.CompactRequest()
        answer = self._scan(self._stub.Compact, request)
        return codec.decode(answer, CompactReport)

    def _scan(self, method: "grpc.UnaryUnaryMultiCallable[Q, A]", request: Q) -> A:
        """Return the answer to a request with much to read: it may take as long as a stream."""
        return self._connection.call(method, request, self._connection.options.stream_deadline_s)


def encode_filter(selection: MeasurementFilter) -> measurement_pb2.MeasurementFilter:
    """Return a filter as it travels."""
    return codec.encode(selection, measurement_pb2.MeasurementFilter)
