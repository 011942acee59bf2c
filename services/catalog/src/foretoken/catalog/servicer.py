"""The catalog over gRPC: proto messages to the port and back."""

from collections.abc import Iterator

import grpc

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.types.v1 import measurement_pb2
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurement import MeasurementBatch, MeasurementFilter, Run
from foretoken.domain.ports import CatalogPort
from foretoken.wire import codec, ipc
from foretoken.wire.serving import register_service, take_page

SERVICE = catalog_pb2.DESCRIPTOR.services_by_name["CatalogService"]
SERVICE_NAME: str = SERVICE.full_name

# A batch is one transaction and lies in memory whole.
MAX_BATCH_BYTES = 512 * 2**20


class CatalogServicer:
    """Answers the catalog's rpcs."""

    def __init__(self, port: CatalogPort) -> None:
        """Keep the port."""
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
        for chunk in ipc.write_chunks(self._port.read_measurements(selection)):
            yield measurement_pb2.ArrowChunk(arrow_ipc=chunk)

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

    def describe_snapshot(
        self, request: catalog_pb2.DescribeSnapshotRequest, _context: grpc.ServicerContext
    ) -> measurement_pb2.Snapshot:
        """Return the content hash of a selection."""
        selection = codec.decode(request.selection, MeasurementFilter)
        return codec.encode(self._port.describe_snapshot(selection), measurement_pb2.Snapshot)


def register(server: grpc.Server, port: CatalogPort) -> None:
    """Let a server answer for this catalog."""
    register_service(server, SERVICE, CatalogServicer(port))


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
                batch_index=chunk.batch_index, rows=ipc.read_chunks(pieces), is_last=chunk.last
            )
            pieces, num_bytes = [], 0
