"""The web server: one event loop in a thread of its own, next to gRPC's server or alone."""

import asyncio
import logging
import threading
from contextlib import ExitStack
from ssl import SSLContext
from typing import Self

from aiohttp import web
from prometheus_client import CollectorRegistry

from foretoken.app.access import Access
from foretoken.app.config import ServerConfig
from foretoken.app.request_metrics import RequestMetrics
from foretoken.app.service_metrics import LaneMetrics
from foretoken.app.telemetry.call_log import OFF
from foretoken.app.tokens import Tokens
from foretoken.app.web.api import PREFIX, add_api, compressed
from foretoken.app.web.callers import Callers, build_tls
from foretoken.app.web.calls import Calls, OfferedServices
from foretoken.app.web.guard import HEALTH, RequestGuard
from foretoken.app.web.openapi import describe_api
from foretoken.app.web.pages import Pages
from foretoken.app.web.request_log import RequestLog
from foretoken.domain.errors import InvalidRequestError

_log = logging.getLogger(__name__)


class WebServer:
    """Answers HTTP for some services."""

    def __init__(
        self,
        config: ServerConfig,
        offered: OfferedServices,
        *,
        logged_calls: str = OFF,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Keep what to serve, and how.

        `logged_calls` is which requests have a line in the log; they are counted in a registry.

        Raises:
            InvalidRequestError: a file of tokens cannot be read, or a caller has no such role.

        """
        self._config = config
        self._logged_calls = logged_calls
        self._registry = registry
        self._metrics = RequestMetrics(registry) if registry is not None else None
        self._closing = ExitStack()
        if self._metrics is not None:
            self._closing.callback(self._metrics.close)
        tokens = Tokens.of(config)
        access = Access.of(config, tokens)
        self.offered = offered
        self._calls = Calls(config, access, offered)
        self._callers = Callers(access, tokens)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="web", daemon=True)
        self._runner: web.AppRunner | None = None
        self.port = 0

    def open(self) -> Self:
        """Begin to serve; `port` is known then.

        Raises:
            InvalidRequestError: nothing can listen there, or the files of TLS cannot be used.

        """
        tls = build_tls(self._config)
        self._thread.start()
        try:
            self.port = asyncio.run_coroutine_threadsafe(self._start(tls), self._loop).result()
        except OSError as err:
            self.close()
            raise InvalidRequestError.of_field(
                "server.http_port",
                f"cannot listen on {self._config.host}:{self._config.http_port}: {err.strerror};"
                " choose another with --http",
            ) from err
        if self._registry is not None:
            lanes = LaneMetrics(self._calls.lanes)
            self._registry.register(lanes)
            self._closing.callback(self._registry.unregister, lanes)
        services = ",".join(self.offered.names)
        _log.info("serving http services=%s address=%s", services, self.address)
        return self

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        scheme = "https" if self._config.tls_certificate_file else "http"
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"{scheme}://{host}:{self.port}/"

    def close(self) -> None:
        """Take no more requests, give those that run a moment, and end."""
        if not self._loop.is_running():
            return
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._calls.close()
        self._closing.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self, tls: SSLContext | None) -> int:
        guard = RequestGuard(self._config)
        log = RequestLog(self._logged_calls, self._metrics)
        pages = Pages(self._calls, self._callers)
        self._closing.callback(pages.close)
        app = web.Application(
            middlewares=[log.observe, guard.guard, pages.show_refusal],
            client_max_size=self._config.http_max_bytes,
        )
        app.on_response_prepare.extend((guard.add_headers, log.add_header))
        app.on_shutdown.append(self._end_streams)
        add_api(app.router, self._calls, self._callers)
        pages.add(app.router)
        app.router.add_get(HEALTH, _answer_health)
        app.router.add_get(f"{PREFIX}/openapi.json", self._describe)
        # Whoever leaves ends what he waited for.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=self._config.grace_s
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, self._config.http_port, ssl_context=tls)
        await site.start()
        host_and_port: tuple[str, int] = self._runner.addresses[0]
        return host_and_port[1]

    async def _end_streams(self, _app: web.Application) -> None:
        self._calls.end_streams()

    async def _describe(self, _request: web.Request) -> web.Response:
        return compressed(web.json_response(describe_api(self.offered.names)))


async def _answer_health(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")
