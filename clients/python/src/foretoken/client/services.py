"""The services as remote ones, each over a connection: blocking, and awaited."""

from collections.abc import AsyncGenerator, Generator, Iterable

from foretoken.client.blocking import complete, iterate
from foretoken.client.remote import AsyncClient, Client
from foretoken.client.sending import Batches, Content, send_run, upload
from foretoken.domain.measurements.measurement import (
    Artifact,
    BatchReceipt,
    MeasurementBatch,
    Run,
)
from foretoken.wire.rpcs import CatalogRpcs, PredictorRpcs, ProfilerRpcs, SimulatorRpcs


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


class PredictorClient(Client, PredictorRpcs):
    """Implements `PredictorPort` over a connection."""


class ProfilerClient(Client, ProfilerRpcs):
    """Implements `ProfilerPort` over a connection."""


class SimulatorClient(Client, SimulatorRpcs):
    """Implements `SimulatorPort` over a connection."""


class AsyncCatalogClient(AsyncClient, CatalogRpcs):
    """`CatalogClient`, awaited."""

    def record(self, run: Run, batches: Batches) -> AsyncGenerator[BatchReceipt]:
        """Store batches of a run, yielding a receipt for each once it is on disk.

        See `CatalogClient.record`; here a group waits for the receipts of the one before.
        """
        return send_run(self.calls, run, batches)

    async def store_artifact(self, artifact: Artifact, content: Content) -> Artifact:
        """Keep a file; the same name and content again changes nothing."""
        return await upload(self.calls, artifact, content)


class AsyncPredictorClient(AsyncClient, PredictorRpcs):
    """`PredictorClient`, awaited."""


class AsyncProfilerClient(AsyncClient, ProfilerRpcs):
    """`ProfilerClient`, awaited."""


class AsyncSimulatorClient(AsyncClient, SimulatorRpcs):
    """`SimulatorClient`, awaited."""
