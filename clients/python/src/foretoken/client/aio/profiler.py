"""The profiler as a remote service, for asyncio."""

from foretoken.client.remote import AsyncClient
from foretoken.wire.rpcs import ProfilerRpcs


class AsyncProfilerClient(AsyncClient, ProfilerRpcs):
    """`ProfilerClient`, awaited."""
