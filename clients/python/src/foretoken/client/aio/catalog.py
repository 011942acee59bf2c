"""The catalog as a remote service, for asyncio."""

from collections.abc import AsyncGenerator

from foretoken.client.recording import Batches, send_run
from foretoken.client.remote import AsyncClient
from foretoken.client.uploading import Content, upload
from foretoken.domain.measurements.artifact import Artifact
from foretoken.domain.measurements.measurement import BatchReceipt, Run
from foretoken.wire.rpcs import CatalogRpcs


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
