"""The predictor over gRPC."""

import grpc

from foretoken.domain.ports import PredictorPort
from foretoken.wire.rpcs import PredictorRpcs
from foretoken.wire.serving import Servicer, register_service

SERVICE = PredictorRpcs.descriptor()
SERVICE_NAME: str = SERVICE.full_name


class PredictorServicer(Servicer, rpcs=PredictorRpcs):
    """Answers the predictor's rpcs."""


def register(server: grpc.Server, port: PredictorPort) -> None:
    """Let a server answer for this predictor."""
    register_service(server, SERVICE, PredictorServicer(port))
