"""Rpcs whose requests are streams, as one body each.

`record` takes the Arrow stream of one batch, `store_artifact` the bytes of a file; what the first
message of the stream would say is in the query string, as JSON: `?run={...}`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.types.v1 import artifact_pb2, measurement_pb2
from foretoken.domain.errors import InvalidRequestError
from foretoken.wire.ipc import CHUNK_BYTES
from foretoken.wire.message_json import fields_to_message, read_message


def _record(query: Mapping[str, str], body: Iterable[bytes]) -> Iterator[Any]:
    run: Any = read_message(_first(query, "run"), measurement_pb2.Run)
    given = {"batch_index": [query.get("batch_index", "0")]}
    first: Any = fields_to_message(given, measurement_pb2.MeasurementChunk)

    def messages() -> Iterator[Any]:
        yield catalog_pb2.RecordRequest(run=run)
        for piece, is_last in _cut(body):
            chunk = measurement_pb2.MeasurementChunk(
                batch_index=first.batch_index,
                arrow_ipc=piece,
                end_of_batch=is_last,
                last=is_last and query.get("last", "true") != "false",
                receipt_wanted=is_last,
            )
            yield catalog_pb2.RecordRequest(chunk=chunk)

    return messages()


def _store_artifact(query: Mapping[str, str], body: Iterable[bytes]) -> Iterator[Any]:
    artifact: Any = read_message(_first(query, "artifact"), artifact_pb2.Artifact)

    def messages() -> Iterator[Any]:
        yield catalog_pb2.StoreArtifactRequest(artifact=artifact)
        for piece, _ in _cut(body):
            yield catalog_pb2.StoreArtifactRequest(chunk=piece)

    return messages()


UPLOADS: Mapping[str, Callable[[Mapping[str, str], Iterable[bytes]], Iterator[Any]]] = {
    "record": _record,
    "store_artifact": _store_artifact,
}


def _first(query: Mapping[str, str], name: str) -> bytes:
    if name not in query:
        raise InvalidRequestError.of_field(name, "must be in the query string, as JSON")
    return query[name].encode()


def _cut(body: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield the body in pieces that fit into a message, and whether each is the last."""
    held = b""
    for piece in body:
        held += piece
        while len(held) > CHUNK_BYTES:
            yield held[:CHUNK_BYTES], False
            held = held[CHUNK_BYTES:]
    yield held, True
