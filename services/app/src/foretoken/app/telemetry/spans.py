"""Spans for OpenTelemetry, sent to a collector over OTLP; the only place that imports it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import foretoken
from foretoken.app.config import TracingConfig
from foretoken.domain.errors import InvalidRequestError
from foretoken.wire import trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

# A collector that is away keeps no process from ending for longer.
_EXPORT_S = 5.0


class _OtlpSpan:
    """A span of OpenTelemetry's."""

    __slots__ = ("_span", "context")

    def __init__(self, span: Any) -> None:
        found = span.get_span_context()
        self._span = span
        self.context = trace.TraceContext(
            f"{found.trace_id:032x}", f"{found.span_id:016x}", bool(found.trace_flags.sampled)
        )

    def set(self, name: str, value: str | float) -> None:
        self._span.set_attribute(name, value)

    def end(self, error: str = "") -> None:
        from opentelemetry.trace import StatusCode

        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class OtlpRecorder:
    """Begins spans of one tracer, within spans of others by what calls carry."""

    def __init__(self, tracer: Any) -> None:
        """Keep the tracer."""
        self._tracer = tracer

    def begin(
        self,
        name: str,
        kind: trace.Kind,
        parent: trace.TraceContext | None,
        attributes: Mapping[str, str],
    ) -> _OtlpSpan:
        """Begin a span; without a parent within the caller's own, if it has one under way."""
        from opentelemetry.trace import (
            NonRecordingSpan,
            SpanContext,
            SpanKind,
            TraceFlags,
            set_span_in_context,
        )

        within = None
        if parent is not None:
            within = set_span_in_context(
                NonRecordingSpan(
                    SpanContext(
                        int(parent.trace_id, 16),
                        int(parent.span_id, 16),
                        is_remote=True,
                        trace_flags=TraceFlags(int(parent.is_sampled)),
                    )
                )
            )
        span = self._tracer.start_span(
            name, context=within, kind=SpanKind[kind.name], attributes=dict(attributes)
        )
        return _OtlpSpan(span)


def start_tracing(
    config: TracingConfig, service: str, exporter: "SpanExporter | None" = None
) -> Callable[[], None]:
    """Record spans from now on, if the configuration says where to, and return what ends that.

    `service` is the name of the process among the others. Headers, compression and the collector's
    certificate come from OpenTelemetry's own variables, `OTEL_EXPORTER_OTLP_HEADERS` and so on.

    Raises:
        InvalidRequestError: OpenTelemetry is not installed.

    """
    if not config.otlp_endpoint:
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ModuleNotFoundError as err:
        raise InvalidRequestError.of_field(
            "tracing.otlp_endpoint", f"needs {err.name}: pip install 'foretoken[tracing]'"
        ) from err

    # By the id of the request: services of one ratio record the same ones, also those whose caller
    # records nothing.
    by_ratio = TraceIdRatioBased(config.sample_ratio)
    sampler = ParentBased(by_ratio, remote_parent_not_sampled=by_ratio)
    named = {"service.name": f"foretoken-{service}", "service.version": foretoken.__version__}
    provider = TracerProvider(sampler=sampler, resource=Resource.create(named))
    exporter = exporter or OTLPSpanExporter(endpoint=config.otlp_endpoint, timeout=_EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.install(OtlpRecorder(provider.get_tracer("foretoken", foretoken.__version__)))

    def stop() -> None:
        trace.uninstall()
        provider.shutdown()

    return stop
