"""The catalog as a remote service."""

from collections.abc import Generator, Iterable

from foretoken.client.blocking import complete, iterate
from foretoken.client.recording import send_run
from foretoken.client.remote import Client
from foretoken.client.uploading import upload
from foretoken.domain.measurements.artifact import Artifact
from foretoken.domain.measurements.measurement import (
    BatchReceipt,
    MeasurementBatch,
    Run,
)
from foretoken.wire.rpcs import CatalogRpcs


class CatalogClient(Client, CatalogRpcs):
    """Implements `CatalogAdminPort` over a connection."""

    def record(self, run: Run, batches: Iterable[MeasurementBatch]) -> Generator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        A profile's batch is asked for when the one before has its receipt; of an import two groups
        of batches at most are read ahead. Batches are asked for in the caller's thread. One whose
        receipt is lost is sent again over a new stream, which is harmless.
        """
        return iterate(send_run(self.calls, run, batches))

    def store_artifact(self, artifact: Artifact, content: Iterable[bytes]) -> Artifact:
        """Keep a file; the same name and content again changes nothing.

        The content is asked for in a thread of gRPC's.
        """
        return complete(upload(self.calls, artifact, content))
