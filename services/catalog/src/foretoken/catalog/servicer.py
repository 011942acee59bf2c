"""The catalog over gRPC: proto messages to the port and back."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import grpc

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.types.v1 import artifact_pb2, job_pb2, measurement_pb2
from foretoken.catalog.sql.query_service import OnLeave
from foretoken.domain.artifact import Artifact
from foretoken.domain.errors import InvalidRequestError, ServiceUnavailableError
from foretoken.domain.measurement import (
    ArrowStream,
    CheckRequest,
    MeasurementBatch,
    MeasurementFilter,
    PruneRequest,
    Run,
    SqlQuery,
)
from foretoken.domain.ports import CatalogAdminPort
from foretoken.wire import codec, ipc
from foretoken.wire.serving import JobRpcs, register_service, take_page

SERVICE = catalog_pb2.DESCRIPTOR.services_by_name["CatalogService"]
SERVICE_NAME: str = SERVICE.full_name

# A batch is one transaction and lies in memory whole.
MAX_BATCH_BYTES = 512 * 2**20


class ServedCatalog(CatalogAdminPort, Protocol):
    """The catalog of this process, whose queries end when their caller leaves."""

    def query_sql(self, query: SqlQuery, on_leave: OnLeave | None = None) -> ArrowStream:
        """Return the result of a read-only SQL query; `on_leave` tells of the caller's leaving."""


class CatalogServicer(JobRpcs):
    """Answers the catalog's rpcs."""

    def __init__(self, port: ServedCatalog) -> None:
        """Keep the port."""
        super().__init__(port)
        self._port = port

    def record(
        self, requests: Iterator[catalog_pb2.RecordRequest], _context: grpc.ServicerContext
    ) -> Iterator[measurement_pb2.BatchReceipt]:
        """Store the batches of a run as they arrive."""
        first = next(requests, None)
        if first is None or first.WhichOneof("content") != "run":
            raise InvalidRequestError.of_field("run", "must be in the first message of the stream")
        run = codec.decode(first.run, Run)
        for receipt in self._port.record(run, _join_chunks(requests)):
            yield codec.encode(receipt, measurement_pb2.BatchReceipt)

    def read_measurements(
        self, request: catalog_pb2.ReadMeasurementsRequest, _context: grpc.ServicerContext
    ) -> Iterator[measurement_pb2.ArrowChunk]:
        """Stream the selected rows."""
        selection = codec.decode(request.selection, MeasurementFilter)
        return _stream(self._port.read_measurements(selection))

    def query_sql(
        self, request: catalog_pb2.QuerySqlRequest, context: grpc.ServicerContext
    ) -> Iterator[measurement_pb2.ArrowChunk]:
        """Stream the result of a read-only query, until the client has it or is gone."""
        query = codec.decode(request, SqlQuery)
        return _stream(self._port.query_sql(query, context.add_callback))

    def describe_coverage(
        self, _request: catalog_pb2.DescribeCoverageRequest, _context: grpc.ServicerContext
    ) -> catalog_pb2.DescribeCoverageResponse:
        """Return row counts."""
        coverage = [
            codec.encode(entry, measurement_pb2.Coverage)
            for entry in self._port.describe_coverage()
        ]
        return catalog_pb2.DescribeCoverageResponse(coverage=coverage)

    def list_runs(
        self, request: catalog_pb2.ListRunsRequest, _context: grpc.ServicerContext
    ) -> catalog_pb2.ListRunsResponse:
        """Return a page of runs, newest first."""
        page, token = take_page(
            self._port.list_runs(),
            lambda summary: summary.run.run_id,
            request.page_size,
            request.page_token,
        )
        runs = [codec.encode(summary, measurement_pb2.RunSummary) for summary in page]
        return catalog_pb2.ListRunsResponse(runs=runs, next_page_token=token)

    def list_devices(
        self, request: catalog_pb2.ListDevicesRequest, _context: grpc.ServicerContext
    ) -> catalog_pb2.ListDevicesResponse:
        """Return a page of devices, by name."""
        page, token = take_page(
            self._port.list_devices(), lambda one: one.name, request.page_size, request.page_token
        )
        devices = [codec.encode(one, measurement_pb2.MeasuredSubject) for one in page]
        return catalog_pb2.ListDevicesResponse(devices=devices, next_page_token=token)

    def list_models(
        self, request: catalog_pb2.ListModelsRequest, _context: grpc.ServicerContext
    ) -> catalog_pb2.ListModelsResponse:
        """Return a page of models, by name."""
        page, token = take_page(
            self._port.list_models(), lambda one: one.name, request.page_size, request.page_token
        )
        models = [codec.encode(one, measurement_pb2.MeasuredSubject) for one in page]
        return catalog_pb2.ListModelsResponse(models=models, next_page_token=token)

    def describe_snapshot(
        self, request: catalog_pb2.DescribeSnapshotRequest, _context: grpc.ServicerContext
    ) -> measurement_pb2.Snapshot:
        """Return the content hash of a selection."""
        selection = codec.decode(request.selection, MeasurementFilter)
        return codec.encode(self._port.describe_snapshot(selection), measurement_pb2.Snapshot)

    def create_snapshot(
        self, request: catalog_pb2.CreateSnapshotRequest, _context: grpc.ServicerContext
    ) -> measurement_pb2.Snapshot:
        """Keep what a filter selects now."""
        selection = codec.decode(request.selection, MeasurementFilter)
        snapshot = self._port.create_snapshot(selection, request.holder)
        return codec.encode(snapshot, measurement_pb2.Snapshot)

    def list_snapshots(
        self, request: catalog_pb2.ListSnapshotsRequest, _context: grpc.ServicerContext
    ) -> catalog_pb2.ListSnapshotsResponse:
        """Return a page of stored snapshots, newest first."""
        page, token = take_page(
            self._port.list_snapshots(),
            lambda snapshot: snapshot.content_hash,
            request.page_size,
            request.page_token,
        )
        snapshots = [codec.encode(snapshot, measurement_pb2.Snapshot) for snapshot in page]
        return catalog_pb2.ListSnapshotsResponse(snapshots=snapshots, next_page_token=token)

    def diff_snapshots(
        self, request: catalog_pb2.DiffSnapshotsRequest, _context: grpc.ServicerContext
    ) -> measurement_pb2.SnapshotDiff:
        """Return what two snapshots differ in."""
        diff = self._port.diff_snapshots(request.before, request.after)
        return codec.encode(diff, measurement_pb2.SnapshotDiff)

    def release_snapshot(
        self, request: catalog_pb2.ReleaseSnapshotRequest, _context: grpc.ServicerContext
    ) -> measurement_pb2.Snapshot:
        """Take a holder from a snapshot."""
        snapshot = self._port.release_snapshot(request.content_hash, request.holder)
        return codec.encode(snapshot, measurement_pb2.Snapshot)

    def delete_snapshot(
        self, request: catalog_pb2.DeleteSnapshotRequest, _context: grpc.ServicerContext
    ) -> catalog_pb2.DeleteSnapshotResponse:
        """Forget a snapshot that nothing holds."""
        self._port.delete_snapshot(request.content_hash)
        return catalog_pb2.DeleteSnapshotResponse()

    def store_artifact(
        self, requests: Iterator[catalog_pb2.StoreArtifactRequest], _context: grpc.ServicerContext
    ) -> artifact_pb2.Artifact:
        """Keep a file as it arrives."""
        first = next(requests, None)
        if first is None or first.WhichOneof("content") != "artifact":
            raise InvalidRequestError.of_field(
                "artifact", "must be in the first message of the stream"
            )
        artifact = codec.decode(first.artifact, Artifact)
        pieces = _read_pieces(requests)
        try:
            stored = self._port.store_artifact(artifact, pieces)
        finally:
            # To the end: asyncio's client does not hear the answer to what it still writes to.
            deque(pieces, maxlen=0)
        return codec.encode(stored, artifact_pb2.Artifact)

    def read_artifact(
        self, request: catalog_pb2.ReadArtifactRequest, _context: grpc.ServicerContext
    ) -> Iterator[catalog_pb2.ArtifactChunk]:
        """Stream the content of a file."""
        for piece in self._port.read_artifact(request.kind, request.name):
            yield catalog_pb2.ArtifactChunk(content=piece)

    def list_artifacts(
        self, request: catalog_pb2.ListArtifactsRequest, _context: grpc.ServicerContext
    ) -> catalog_pb2.ListArtifactsResponse:
        """Return a page of what is kept of a kind, newest first."""
        page, token = take_page(
            self._port.list_artifacts(request.kind),
            lambda artifact: artifact.name,
            request.page_size,
            request.page_token,
        )
        artifacts = [codec.encode(artifact, artifact_pb2.Artifact) for artifact in page]
        return catalog_pb2.ListArtifactsResponse(artifacts=artifacts, next_page_token=token)

    def activate_artifact(
        self, request: catalog_pb2.ActivateArtifactRequest, _context: grpc.ServicerContext
    ) -> artifact_pb2.Artifact:
        """Choose the active file of a kind."""
        artifact = self._port.activate_artifact(request.kind, request.name)
        return codec.encode(artifact, artifact_pb2.Artifact)

    def delete_artifact(
        self, request: catalog_pb2.DeleteArtifactRequest, _context: grpc.ServicerContext
    ) -> catalog_pb2.DeleteArtifactResponse:
        """Forget a file that is not active."""
        self._port.delete_artifact(request.kind, request.name)
        return catalog_pb2.DeleteArtifactResponse()

    def create_check(
        self, request: catalog_pb2.CreateCheckRequest, _context: grpc.ServicerContext
    ) -> Any:
        """Start a check of stored rows."""
        job = self._port.create_check(codec.decode(request, CheckRequest))
        return codec.encode(job, job_pb2.Job)

    def get_check_report(
        self, request: catalog_pb2.GetCheckReportRequest, _context: grpc.ServicerContext
    ) -> measurement_pb2.QualityReport:
        """Return the result of a finished check."""
        report = self._port.get_check_report(request.job_id)
        return codec.encode(report, measurement_pb2.QualityReport)

    def backup(
        self, _request: catalog_pb2.BackupRequest, _context: grpc.ServicerContext
    ) -> Iterator[catalog_pb2.BackupChunk]:
        """Stream a copy of the catalog."""
        for piece in self._port.backup():
            yield catalog_pb2.BackupChunk(content=piece)

    def prune(
        self, request: catalog_pb2.PruneRequest, _context: grpc.ServicerContext
    ) -> catalog_pb2.PruneReport:
        """Delete old runs that no snapshot needs."""
        report = self._port.prune(codec.decode(request, PruneRequest))
        return codec.encode(report, catalog_pb2.PruneReport)

    def compact(
        self, _request: catalog_pb2.CompactRequest, _context: grpc.ServicerContext
    ) -> catalog_pb2.CompactReport:
        """Write the catalog's files anew."""
        return codec.encode(self._port.compact(), catalog_pb2.CompactReport)


def register(server: grpc.Server, port: ServedCatalog) -> None:
    """Let a server answer for this catalog."""
    register_service(server, SERVICE, CatalogServicer(port))


def _stream(rows: ArrowStream) -> Iterator[measurement_pb2.ArrowChunk]:
    for chunk in ipc.write_chunks(rows):
        yield measurement_pb2.ArrowChunk(arrow_ipc=chunk)


def _read_pieces(requests: Iterator[catalog_pb2.StoreArtifactRequest]) -> Iterator[bytes]:
    try:
        for request in requests:
            if request.WhichOneof("content") != "chunk":
                raise InvalidRequestError.of_field(
                    "chunk", "must be in every message but the first"
                )
            yield request.chunk
    except grpc.RpcError as err:
        raise ServiceUnavailableError("the sender left before the end of the file") from err


def _join_chunks(requests: Iterator[catalog_pb2.RecordRequest]) -> Iterator[MeasurementBatch]:
    pieces: list[bytes] = []
    num_bytes = 0
    for request in requests:
        if request.WhichOneof("content") != "chunk":
            raise InvalidRequestError.of_field("chunk", "must be in every message but the first")
        chunk = request.chunk
        num_bytes += len(chunk.arrow_ipc)
        if num_bytes > MAX_BATCH_BYTES:
            raise InvalidRequestError.of_field(
                "chunk", f"batch {chunk.batch_index} exceeds {MAX_BATCH_BYTES} bytes; split it"
            )
        pieces.append(chunk.arrow_ipc)
        if chunk.end_of_batch:
            yield MeasurementBatch(
                batch_index=chunk.batch_index,
                rows=ipc.read_chunks(pieces),
                is_last=chunk.last,
                wants_receipt=chunk.receipt_wanted,
            )
            pieces, num_bytes = [], 0
