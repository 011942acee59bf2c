"""Send a file to a remote catalog, in pieces."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.types.v1 import artifact_pb2
from foretoken.client.blocking import each
from foretoken.client.calls import Calls
from foretoken.domain.measurements.artifact import Artifact
from foretoken.wire import codec

Content = Iterable[bytes] | AsyncIterable[bytes]

# A message of a stream.
_PIECE_BYTES = 2 * 2**20


async def upload(calls: Calls, artifact: Artifact, content: Content) -> Artifact:
    """Keep a file, and return what the catalog knows of it.

    gRPC requests the content in a thread or task of its own. An error of whoever gives it comes
    before what it made of the call.
    """
    errors: list[Exception] = []
    method = calls.method(calls.messages["store_artifact"])
    try:
        answer = await calls.ask(
            lambda left_s: calls.transport.send(
                method, calls.transport.requests(_messages(artifact, content, errors)), left_s
            ),
            calls.options.stream_deadline_s,
            is_repeatable=not isinstance(content, Iterator | AsyncIterator),
        )
    except BaseException:  # asyncio's client cancels the caller then
        for error in errors:
            raise error from None
        raise
    return codec.decode(answer, Artifact)


async def _messages(
    artifact: Artifact, content: Content, errors: list[Exception]
) -> AsyncGenerator[catalog_pb2.StoreArtifactRequest]:
    """Yield what is known of the file, then its content; note what error that raises."""
    message = codec.encode(artifact, artifact_pb2.Artifact)
    yield catalog_pb2.StoreArtifactRequest(artifact=message)
    try:
        async for piece in each(content):
            for start in range(0, len(piece), _PIECE_BYTES):
                chunk = piece[start : start + _PIECE_BYTES]
                yield catalog_pb2.StoreArtifactRequest(chunk=chunk)
    except Exception as err:
        errors.append(err)
        raise
