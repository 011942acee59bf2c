"""Handlers of calls that something watches: what is counted, timed or logged of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[..., Any]


def observe_handler(
    handler: Handler,
    unary: Callable[[Behaviour], Behaviour],
    stream: Callable[[Behaviour], Behaviour],
) -> Handler:
    """Return a handler with its behaviour wrapped, by whether it answers once or with a stream."""
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        behaviour = getattr(handler, kind)
        if behaviour is not None:
            observe = stream if kind.endswith("_stream") else unary
            build = getattr(grpc, f"{kind}_rpc_method_handler")
            wrapped: Handler = build(
                observe(behaviour),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
            return wrapped
    return handler
