"""Metrics of the calls of a serving process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# From a cached predict call to a day-long watch, in s.
_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60, 600)


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class RequestMetrics(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Count and time every call of a server, by service, method and status code.

    Metric names are `foretoken_<service>_requests_total` and so on; the service is that of the
    method called (`foretoken.api.catalog.v1.CatalogService` is `catalog`).
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._by_service: dict[str, _ServiceMetrics] = {}
        # Interceptors are asked at every call; a method has its own handler and those that refuse.
        self._wrapped: dict[tuple[str, Handler], Handler] = {}

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the method's handler; calls outside our own API pass as they are."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        key = handler_call_details.method, handler
        if key not in self._wrapped:
            metrics, method = self._find(handler_call_details.method)
            self._wrapped[key] = handler if metrics is None else metrics.wrap(handler, method)
        return self._wrapped[key]

    def close(self) -> None:
        """Take the metrics away, so that another server of this process can have its own."""
        for metrics in self._by_service.values():
            metrics.unregister(self._registry)

    def count_refused(self, full_method: str) -> None:
        """Count a call that was refused because there were too many."""
        metrics, method = self._find(full_method)
        if metrics is not None:
            metrics.refused.labels(method).inc()

    def count_undecodable(self, full_method: str) -> None:
        """Count bytes that were sent to a method and are no message."""
        metrics, method = self._find(full_method)
        if metrics is not None:
            metrics.undecodable.labels(method).inc()

    def _find(self, full_method: str) -> tuple[_ServiceMetrics | None, str]:
        parts = full_method.strip("/").split(".")
        if parts[:2] != ["foretoken", "api"]:
            return None, ""
        service, method = parts[2], parts[-1].split("/")[-1]
        if service not in self._by_service:
            self._by_service[service] = _ServiceMetrics(service, self._registry)
        return self._by_service[service], method


class _ServiceMetrics:
    """The metrics of one service."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        prefix = f"foretoken_{service}"
        self._requests = Counter(
            f"{prefix}_requests_total",
            "Calls ended, by status",
            ("method", "code"),
            registry=registry,
        )
        self._seconds = Histogram(
            f"{prefix}_request_seconds",
            "Time to the end of a call",
            ("method",),
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self._in_flight = Gauge(
            f"{prefix}_requests_in_flight", "Calls now running", ("method",), registry=registry
        )
        self.refused = Counter(
            f"{prefix}_refused_requests_total",
            "Calls refused because there were too many of their method",
            ("method",),
            registry=registry,
        )
        self.undecodable = Counter(
            f"{prefix}_undecodable_messages_total",
            "Messages whose bytes could not be decoded",
            ("method",),
            registry=registry,
        )

    def unregister(self, registry: CollectorRegistry) -> None:
        for metric in (
            self._requests,
            self._seconds,
            self._in_flight,
            self.refused,
            self.undecodable,
        ):
            registry.unregister(metric)

    def wrap(self, handler: Handler, method: str) -> Handler:
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, kind)
            if behaviour is not None:
                streams = kind.endswith("_stream")
                timed = self._time_stream if streams else self._time_unary
                build = getattr(grpc, f"{kind}_rpc_method_handler")
                wrapped: Handler = build(
                    timed(behaviour, method),
                    request_deserializer=handler.request_deserializer,
                    response_serializer=handler.response_serializer,
                )
                return wrapped
        return handler

    def _time_unary(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        in_flight = self._in_flight.labels(method)

        # With what says in which threads it runs.
        @functools.wraps(behaviour)
        def timed(request: Any, context: grpc.ServicerContext) -> Any:
            started = time.perf_counter()
            in_flight.inc()
            try:
                return behaviour(request, context)
            finally:
                in_flight.dec()
                self._observe(method, context, started)

        return timed

    def _time_stream(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        in_flight = self._in_flight.labels(method)

        @functools.wraps(behaviour)
        def timed(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            started = time.perf_counter()
            in_flight.inc()
            try:
                yield from behaviour(request, context)
            finally:
                in_flight.dec()
                self._observe(method, context, started)

        return timed

    def _observe(self, method: str, context: Any, started: float) -> None:
        self._seconds.labels(method).observe(time.perf_counter() - started)
        code = context.code()
        self._requests.labels(method, code.name if code is not None else "OK").inc()
