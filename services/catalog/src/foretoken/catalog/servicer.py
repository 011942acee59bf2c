"""The catalog over gRPC."""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import grpc

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.types.v1 import artifact_pb2, measurement_pb2
from foretoken.catalog.sql.query_service import OnLeave
from foretoken.domain.errors import InvalidRequestError, ServiceUnavailableError
from foretoken.domain.measurements.measurement import (
    ArrowStream,
    Artifact,
    MeasurementBatch,
    Run,
    SqlQuery,
)
from foretoken.domain.ports import CatalogAdminPort
from foretoken.wire import codec, ipc
from foretoken.wire.rpcs import CatalogRpcs
from foretoken.wire.serving import Servicer, register_service, stream_table

SERVICE = CatalogRpcs.descriptor()
SERVICE_NAME: str = SERVICE.full_name

# A batch is one transaction and lies in memory whole.
MAX_BATCH_BYTES = 512 * 2**20


class ServedCatalog(CatalogAdminPort, Protocol):
    """The catalog of this process, whose queries end when their caller leaves."""

    def query_sql(self, query: SqlQuery, on_leave: OnLeave | None = None) -> ArrowStream:
        """Return the result of a read-only SQL query; `on_leave` tells of the caller's leaving."""


class CatalogServicer(Servicer, rpcs=CatalogRpcs):
    """Answers the catalog's rpcs."""

    def record(
        self, requests: Iterator[catalog_pb2.RecordRequest], _context: grpc.ServicerContext
    ) -> Iterator[measurement_pb2.BatchReceipt]:
        """Store the batches of a run as they arrive."""
        first = next(requests, None)
        if first is None or first.WhichOneof("content") != "run":
            raise InvalidRequestError.of_field("run", "must be in the first message of the stream")
        run = codec.decode(first.run, Run)
        for receipt in self.port.record(run, _join_chunks(requests)):
            yield codec.encode(receipt, measurement_pb2.BatchReceipt)

    def query_sql(
        self, request: catalog_pb2.QuerySqlRequest, context: grpc.ServicerContext
    ) -> Iterator[measurement_pb2.ArrowChunk]:
        """Stream the result of a read-only query, until the client has it or is gone."""
        query = codec.decode(request, SqlQuery)
        return stream_table(self.port.query_sql(query, context.add_callback))

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
            stored = self.port.store_artifact(artifact, pieces)
        finally:
            # To the end: asyncio's client does not hear the answer to what it still writes to.
            deque(pieces, maxlen=0)
        return codec.encode(stored, artifact_pb2.Artifact)


def register(server: grpc.Server, port: ServedCatalog) -> None:
    """Let a server answer for this catalog."""
    register_service(server, SERVICE, CatalogServicer(port))


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
