"""What stands before every request: which hosts, whose pages, which headers."""

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from foretoken.app.access import is_loopback
from foretoken.app.config import ServerConfig
from foretoken.app.web.problem import HttpRefusal, answer_problem
from foretoken.domain.errors import ForetokenError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEALTH: Final = "/healthz"
# Only what this server sends runs, and nothing is asked of another host. Styles of elements are
# allowed: charts and tables set widths and colours there.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline';"
    " img-src 'self' data:; font-src 'self'; connect-src 'self'; form-action 'self';"
    " frame-src 'self'; frame-ancestors 'self'; base-uri 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    # Without a referrer browsers would not say of what site a form is.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
_SAFE = {"GET", "HEAD", "OPTIONS"}
_OWN_SITES = {"same-origin", "none"}
_FORBIDDEN, _MISDIRECTED = 403, 421


class RequestGuard:
    """A middleware: refuses what other sites send, and sends the headers of every answer."""

    def __init__(self, config: ServerConfig) -> None:
        """Keep the names by which browsers may reach the server."""
        self._hosts = frozenset(name.lower() for name in config.http_hosts)
        self._is_local = is_loopback(config.host)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request, or refuse it; aiohttp calls this."""
        try:
            self.check(request)
            return await handler(request)
        except (ForetokenError, HttpRefusal, web.RequestPayloadError) as err:
            return answer_problem(err)
        except web.HTTPException as err:
            answer = answer_problem(HttpRefusal(err.status, "HTTP", err.reason))
            answer.headers.update(
                {key: err.headers[key] for key in ("Allow", "Location") if key in err.headers}
            )
            return answer

    async def add_headers(self, _request: web.Request, answer: web.StreamResponse) -> None:
        """Add the headers to an answer that is about to be sent."""
        for name, value in _HEADERS.items():
            answer.headers.setdefault(name, value)
        answer.headers.popall("Server", None)

    def check(self, request: web.Request) -> None:
        """Refuse a request that another site made in this user's browser.

        A name of another site may be resolved to this machine, where whoever calls may do
        everything: the name it was called by tells.

        Raises:
            HttpRefusal: it is for another host, or of another site and changes something.

        """
        host = _host_of(f"//{request.host}")
        # Probes call it by the address of its pod.
        if request.path != HEALTH and not self._knows(host):
            raise HttpRefusal(
                _MISDIRECTED,
                "WRONG_HOST",
                f"{host} is not a name of this server; server.http_hosts lists them",
            )
        if request.method in _SAFE:
            return
        site = request.headers.get("Sec-Fetch-Site", "none")
        origin = request.headers.get("Origin")
        own = {f"{scheme}://{request.host.lower()}" for scheme in ("http", "https")}
        is_own = origin is None or origin.lower() in own
        if site not in _OWN_SITES or not is_own:
            raise HttpRefusal(
                _FORBIDDEN, "CROSS_SITE", "pages of other sites may not change anything here"
            )

    def _knows(self, host: str) -> bool:
        if self._hosts:
            return host in self._hosts
        if not self._is_local:
            return True
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def _host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""
