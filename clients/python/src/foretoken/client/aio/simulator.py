"""The simulator as a remote service, for asyncio."""

from foretoken.client.remote import AsyncClient
from foretoken.wire.rpcs import SimulatorRpcs


class AsyncSimulatorClient(AsyncClient, SimulatorRpcs):
    """`SimulatorClient`, awaited."""
