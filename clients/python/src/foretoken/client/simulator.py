"""The simulator as a remote service."""

from foretoken.client.remote import Client
from foretoken.wire.rpcs import SimulatorRpcs


class SimulatorClient(Client, SimulatorRpcs):
    """Implements `SimulatorPort` over a connection."""
