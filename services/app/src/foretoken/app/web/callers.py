"""Who makes a request over HTTP: by certificate, bearer token, or the cookie that holds one."""

import asyncio
import logging
import ssl
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from foretoken.app.access import Access
from foretoken.app.config import ServerConfig
from foretoken.app.tokens import Tokens
from foretoken.domain.errors import InvalidRequestError, UnauthenticatedError
from foretoken.wire.credential_files import CredentialFiles

_log = logging.getLogger(__name__)

# A browser that was given a token shows it so: no script can read it, no other site sends it.
COOKIE: Final = "foretoken_token"


class Callers:
    """Finds the names of who makes a request; who has which right `Access` says."""

    def __init__(self, access: Access, tokens: Tokens | None) -> None:
        """Keep whom there is to ask."""
        self.access = access
        self._tokens = tokens

    async def find(self, request: web.Request) -> tuple[str, ...]:
        """Return the names.

        Raises:
            UnauthenticatedError: the server wants a token, and there is none, or one it knows not.
            ServiceUnavailableError: nobody can say now whose its token is.

        """
        if self._tokens is not None and self._tokens.may_wait:
            # Others are asked, and this thread has all other requests to answer.
            return await asyncio.to_thread(self._find, request)
        return self._find(request)

    def _find(self, request: web.Request) -> tuple[str, ...]:
        metadata = _metadata(request)
        if self._tokens is not None and self._tokens.find(metadata) is None:
            raise UnauthenticatedError(
                "this server wants a token: send it as `Authorization: Bearer ...`, or sign in"
            )
        connection = request.get_extra_info("ssl_object")
        if connection is not None and (shown := connection.getpeercert(binary_form=True)):
            self.access.check_revoked(shown)
        return self.access.name(_certificate(request), metadata)

    @property
    def has_tokens(self) -> bool:
        """Whether there are tokens to sign in with."""
        return self._tokens is not None

    async def is_token(self, token: str) -> bool:
        """Return whether somebody has this token."""
        shown = {"authorization": f"Bearer {token}"}
        if self._tokens is None:
            return False
        try:
            return await asyncio.to_thread(self._tokens.find, shown) is not None
        except UnauthenticatedError:
            return False


def peer_of(request: web.Request) -> str:
    """Return where a request comes from, for logs."""
    return f"http:{request.remote}"


def _metadata(request: web.Request) -> Mapping[str, str]:
    shown = request.headers.get("Authorization")
    if shown is None and (token := request.cookies.get(COOKIE)):
        shown = f"Bearer {token}"
    return {"authorization": shown} if shown else {}


def _certificate(request: web.Request) -> Mapping[str, Any]:
    """Return the names of the certificate that TLS has checked, as gRPC gives them."""
    connection = request.get_extra_info("ssl_object")
    shown = connection.getpeercert() if connection is not None else None
    if not shown:
        return {}
    ids = [
        value.encode()
        for kind, value in shown.get("subjectAltName", ())
        if kind == "URI" and value.startswith("spiffe://")
    ]
    names = [
        value.encode()
        for part in shown.get("subject", ())
        for key, value in part
        if key == "commonName"
    ]
    return {"peer_spiffe_id": ids, "x509_common_name": names}


def build_tls(config: ServerConfig) -> ssl.SSLContext | None:
    """Return what TLS is spoken with, as the gRPC server's; None where it is not.

    Certificates that were renewed are read at the next handshake.

    Raises:
        InvalidRequestError: a file cannot be read, or is no certificate or key.

    """
    if not config.tls_certificate_file:
        return None
    names = ("tls_certificate_file", "tls_key_file", "tls_client_ca_file")
    files = CredentialFiles({f"server.{name}": getattr(config, name) for name in names})
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if config.tls_client_ca_file:
        context.verify_mode = ssl.CERT_REQUIRED

    def load() -> None:
        files.read()
        context.load_cert_chain(config.tls_certificate_file, config.tls_key_file)
        if config.tls_client_ca_file:
            context.load_verify_locations(config.tls_client_ca_file)

    def renew(*_: object) -> None:
        if files.has_changed():
            try:
                load()
            except (ssl.SSLError, OSError, InvalidRequestError) as err:
                _log.warning("certificates stay as they were: %s", err)

    try:
        load()
    except (ssl.SSLError, OSError) as err:
        raise InvalidRequestError.of_field("server.tls_certificate_file", f"{err}") from err
    context.sni_callback = renew
    return context
