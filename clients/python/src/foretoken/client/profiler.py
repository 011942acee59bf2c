"""The profiler as a remote service."""

from foretoken.client.remote import Client
from foretoken.wire.rpcs import ProfilerRpcs


class ProfilerClient(Client, ProfilerRpcs):
    """Implements `ProfilerPort` over a connection."""
