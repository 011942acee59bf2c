"""The predictor as a remote service, for asyncio."""

from foretoken.client.remote import AsyncClient
from foretoken.wire.rpcs import PredictorRpcs


class AsyncPredictorClient(AsyncClient, PredictorRpcs):
    """`PredictorClient`, awaited."""
