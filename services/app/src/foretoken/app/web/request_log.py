"""Every request over HTTP: its id in logs, problems and the answer, a span, a line."""

from contextlib import ExitStack

from aiohttp import web

from foretoken.app.request_metrics import RequestMetrics
from foretoken.app.telemetry.call_log import ObservedCall, read_parent
from foretoken.app.web.callers import peer_of
from foretoken.app.web.guard import HEALTH, Handler
from foretoken.wire import trace

# What answers are named by; proxies and browsers show it.
REQUEST_ID = "X-Request-Id"
_REFUSED, _INTERNAL = 400, 500
_STATUS = "http.response.status_code"


class RequestLog:
    """A middleware, the first, so that it sees what the others refuse."""

    def __init__(self, logs: str, metrics: RequestMetrics | None) -> None:
        """Keep which requests have a line (`off`, `failed` or `all`), and what counts them."""
        self._logs = logs
        self._metrics = metrics

    @web.middleware
    async def observe(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request within a span; aiohttp calls this."""
        if request.path == HEALTH:
            return await handler(request)
        # The pattern, not the path: that has names in it.
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        call = self._begin(request, route)
        status = _INTERNAL
        with ExitStack() as stack:
            if self._metrics is not None:
                method = f"{request.method} {route or 'unknown'}"
                stack.enter_context(self._metrics.of_web().observe(method, lambda: str(status)))
            try:
                answer = await handler(request)
                status = answer.status
            finally:
                call.end(_STATUS, status, is_ok=status < _REFUSED, is_fault=status >= _INTERNAL)
        return answer

    async def add_header(self, _request: web.Request, answer: web.StreamResponse) -> None:
        """Name the request in an answer that is about to be sent."""
        if (work := trace.current()) is not None:
            answer.headers[REQUEST_ID] = work.trace_id

    def _begin(self, request: web.Request, route: str) -> ObservedCall:
        name = f"{request.method} {route}".rstrip()
        attributes = {"http.request.method": request.method, "http.route": route}
        parent = read_parent(request.headers.get(trace.TRACEPARENT, ""))
        span = trace.begin_request(name, trace.Kind.SERVER, parent, attributes)
        call = ObservedCall(
            span, f"http={request.method} route={route or '-'}", peer_of(request), self._logs
        )
        # Each connection has a task, and each of its requests enters anew.
        call.enter()
        return call
