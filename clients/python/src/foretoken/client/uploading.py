"""Send a file to a remote catalog, in pieces."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager

from foretoken.api.catalog.v1 import catalog_service_pb2 as catalog_pb2
from foretoken.api.types.v1 import artifact_pb2
from foretoken.domain.artifact import Artifact
from foretoken.wire import codec

# A message of a stream.
_PIECE_BYTES = 2 * 2**20


class Upload:
    """The messages that store a file. gRPC asks for them in a thread or task of its own."""

    def __init__(self, artifact: Artifact) -> None:
        """Keep what is known of the file."""
        self._artifact = artifact
        self._error: Exception | None = None

    def messages(self, content: Iterable[bytes]) -> Iterator[catalog_pb2.StoreArtifactRequest]:
        """Yield what is known of the file, then its content."""
        yield self._first()
        with self._remembered():
            for piece in content:
                yield from _cut(piece)

    async def messages_async(
        self, content: Iterable[bytes] | AsyncIterable[bytes]
    ) -> AsyncIterator[catalog_pb2.StoreArtifactRequest]:
        """`messages`, awaited."""
        yield self._first()
        with self._remembered():
            if isinstance(content, AsyncIterable):
                async for piece in content:
                    for message in _cut(piece):
                        yield message
            else:
                for piece in content:
                    for message in _cut(piece):
                        yield message

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let an error of whoever gives the content come before what it made of the call."""
        try:
            yield
        except BaseException:  # asyncio's client cancels the caller then
            if self._error is not None:
                raise self._error from None
            raise

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        try:
            yield
        except Exception as err:
            self._error = err
            raise

    def _first(self) -> catalog_pb2.StoreArtifactRequest:
        message = codec.encode(self._artifact, artifact_pb2.Artifact)
        return catalog_pb2.StoreArtifactRequest(artifact=message)


def _cut(piece: bytes) -> Iterator[catalog_pb2.StoreArtifactRequest]:
    for start in range(0, len(piece), _PIECE_BYTES):
        yield catalog_pb2.StoreArtifactRequest(chunk=piece[start : start + _PIECE_BYTES])
