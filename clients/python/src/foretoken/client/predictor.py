"""The predictor as a remote service."""

from foretoken.client.remote import Client
from foretoken.wire.rpcs import PredictorRpcs


class PredictorClient(Client, PredictorRpcs):
    """Implements `PredictorPort` over a connection."""
