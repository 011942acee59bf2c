"""Metrics of the calls of a serving process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from foretoken.app.observed_handler import code_of
from foretoken.app.telemetry.metric_table import WEB, find_metric

# From a cached predict call to a day-long watch, in s.
_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60, 600)


M = TypeVar("M", Counter, Gauge, Histogram)


class RequestMetrics:
    """Count and time every call of a server, by service, method and status code.

    Metric names are `foretoken_<service>_requests_total` and so on; the service is that of the
    method called (`foretoken.api.catalog.v1.CatalogService` is `catalog`).
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._by_service: dict[str, _ServiceMetrics] = {}
        self._lock = threading.Lock()

    def observe_call(
        self, method: str, context: grpc.ServicerContext
    ) -> AbstractContextManager[None]:
        """Count and time a call in a block; calls outside our own API are none of ours."""
        metrics, name = self._find(method)
        if metrics is None:
            return nullcontext()
        return metrics.observe(name, lambda: code_of(context))

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

    def of_web(self) -> _ServiceMetrics:
        """Return the metrics of requests over HTTP."""
        return self._of(WEB)

    def _find(self, full_method: str) -> tuple[_ServiceMetrics | None, str]:
        parts = full_method.strip("/").split(".")
        if parts[:2] != ["foretoken", "api"]:
            return None, ""
        service, method = parts[2], parts[-1].split("/")[-1]
        return self._of(service), method

    def _of(self, service: str) -> _ServiceMetrics:
        """Return a service's metrics, made by the first of the calls that need them at once."""
        with self._lock:
            if service not in self._by_service:
                self._by_service[service] = _ServiceMetrics(service, self._registry)
            return self._by_service[service]


class _ServiceMetrics:
    """The metrics of one service."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        def new(cls: type[M], name: str, **options: Any) -> M:
            found = find_metric(service, name)
            labels, full_name = found.labels, found.full_name(service)
            return cls(full_name, found.meaning, labels, registry=registry, **options)

        self._requests = new(Counter, "requests")
        self._seconds = new(Histogram, "request_seconds", buckets=_BUCKETS_S)
        self._in_flight = new(Gauge, "requests_in_flight")
        self._made: list[Counter | Gauge | Histogram] = [
            self._requests,
            self._seconds,
            self._in_flight,
        ]
        if service != WEB:
            self.refused = new(Counter, "refused_requests")
            self.undecodable = new(Counter, "undecodable_messages")
            self._made += [self.refused, self.undecodable]

    def unregister(self, registry: CollectorRegistry) -> None:
        for metric in self._made:
            registry.unregister(metric)

    @contextmanager
    def observe(self, method: str, code_of: Callable[[], str]) -> Iterator[None]:
        """Count and time a block as a call."""
        started = time.perf_counter()
        in_flight = self._in_flight.labels(method)
        in_flight.inc()
        try:
            yield
        finally:
            in_flight.dec()
            self._seconds.labels(method).observe(time.perf_counter() - started)
            self._requests.labels(method, code_of()).inc()
