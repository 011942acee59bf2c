"""How a test reaches a port."""

from collections.abc import Callable
from typing import Any, Protocol

import grpc

from foretoken.client.channel_options import ChannelOptions


class Reach(Protocol):
    """Return a port as its users see it: the object, or a client of it over real gRPC."""

    def __call__(
        self,
        port: Any,
        register: Callable[[grpc.Server, Any], None],
        connect: Callable[[ChannelOptions], Any],
    ) -> Any: ...
