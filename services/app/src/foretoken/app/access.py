"""Who calls a server, what they may call, and a log of what they changed."""

import hashlib
import ipaddress
import logging
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from foretoken.app.config import ServerConfig
from foretoken.app.telemetry.call_log import note_caller
from foretoken.app.tokens import Tokens, no_token
from foretoken.domain.caller import answering
from foretoken.domain.errors import (
    ForetokenError,
    InvalidRequestError,
    NotAllowedError,
    UnauthenticatedError,
)
from foretoken.wire.credential_files import CredentialFiles
from foretoken.wire.rights import Right, rights_of
from foretoken.wire.rpcs import TABLES

_log = logging.getLogger(__name__)
_audit = logging.getLogger("foretoken.audit")

_REVOKED_FILE = "server.revoked_file"
# Of a SHA-256, hexadecimal.
_NUM_DIGITS = 64

ANONYMOUS, ANYBODY = "anonymous", "*"
# Probes and balancers need it, and they have no identity.
_OPEN_SERVICE = "/grpc.health.v1.Health/"
_RIGHTS: Mapping[str, Right] = {
    f"/{table.service}/{line.rpc_name}": line.right
    for table in TABLES
    for line in table.lines().values()
}
# Reading and planning leave nothing that others read, and work would fill the log with heartbeats.
_UNLOGGED = {Right.READ, Right.PLAN, Right.CANCEL, Right.WORK}


def is_open(method: str) -> bool:
    """Return whether anybody may call a method, by its full name."""
    return method.startswith(_OPEN_SERVICE)


class RevokedCertificates:
    """Fingerprints in a file, a line each, which is read again when it changes.

    They are what `openssl x509 -fingerprint -sha256 -noout` prints, with or without colons; what
    follows a # is for people.
    """

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            InvalidRequestError: it cannot be read, or a line is no fingerprint.

        """
        self._files = CredentialFiles({_REVOKED_FILE: path})
        self._lock = threading.Lock()
        self._known = self._read()

    def check(self, certificate: bytes) -> None:
        """Refuse a certificate, in DER, that is in the file.

        Raises:
            UnauthenticatedError: it is.

        """
        with self._lock:
            if self._files.has_changed():
                try:
                    self._known = self._read()
                except InvalidRequestError as err:
                    _log.warning("revoked certificates stay as they were: %s", err.message)
        if hashlib.sha256(certificate).hexdigest() in self._known:
            raise UnauthenticatedError("the certificate has been revoked; ask for another")

    def _read(self) -> frozenset[str]:
        found = set()
        for line in self._files.read()[_REVOKED_FILE].decode(errors="replace").splitlines():
            text = line.partition("#")[0].rpartition("=")[2].strip().replace(":", "").lower()
            if text and not (len(text) == _NUM_DIGITS and set(text) <= set("0123456789abcdef")):
                raise InvalidRequestError.of_field(
                    _REVOKED_FILE, f"{line!r} is no SHA-256 fingerprint"
                )
            found.add(text)
        return frozenset(found - {""})


class Access:
    """Decides about calls by who makes them.

    Without grants whoever showed who he is may do everything, and so may anybody who is on the same
    machine; others who show nothing may read.
    """

    def __init__(
        self,
        grants: Mapping[str, tuple[str, ...]],
        tokens: Tokens | None,
        *,
        checks_certificates: bool,
        is_local: bool,
        revoked: RevokedCertificates | None = None,
    ) -> None:
        """Keep the roles of callers by their names.

        Raises:
            InvalidRequestError: no such role.

        """
        everything = rights_of(("admin",))
        by_default = {
            ANONYMOUS: everything if is_local else rights_of(("reader",)),
            ANYBODY: everything,
        }
        given = {name: rights_of(roles) for name, roles in grants.items()}
        self._rights = given or by_default
        self._tokens = tokens
        self._checks_certificates = checks_certificates
        self._revoked = revoked

    @classmethod
    def of(cls, config: ServerConfig, tokens: Tokens | None) -> "Access":
        """Return what a server's configuration says.

        Raises:
            InvalidRequestError: no such role, or the revoked certificates cannot be read.

        """
        return cls(
            config.callers,
            tokens,
            checks_certificates=bool(config.tls_client_ca_file),
            is_local=is_loopback(config.host),
            revoked=RevokedCertificates(config.revoked_file) if config.revoked_file else None,
        )

    @contextmanager
    def admit(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Let a call over gRPC run, as `enter` does."""
        if is_open(method):
            yield
            return
        try:
            callers = self.find(context)
        except UnauthenticatedError as err:
            rpc = method.rpartition("/")[2]
            _audit.warning("refused rpc=%s peer=%s: %s", rpc, context.peer(), err.message)
            raise
        with self.enter(method, callers, context.peer()):
            yield

    @contextmanager
    def enter(self, method: str, callers: tuple[str, ...], peer: str) -> Iterator[None]:
        """Let a call run by the names of who makes it, and log it where it leaves something.

        Raises:
            NotAllowedError: the caller lacks the right.
            UnauthenticatedError: who shows nothing lacks it.

        """
        # Reflection, which is in no table, reads.
        right = _RIGHTS.get(method, Right.READ)
        name, rpc = " and ".join(callers) or ANONYMOUS, method.rpartition("/")[2]
        note_caller(name)
        if not self.allows(right, callers):
            _audit.warning("refused caller=%s rpc=%s peer=%s", name, rpc, peer)
            raise _refusal(name, rpc, right)
        outcome = "failed"
        try:
            with answering(name):
                yield
            outcome = "done"
        except ForetokenError as err:
            outcome = err.reason
            raise
        finally:
            if right not in _UNLOGGED:
                _audit.info("caller=%s rpc=%s outcome=%s peer=%s", name, rpc, outcome, peer)

    def allows(self, right: Right, callers: tuple[str, ...]) -> bool:
        """Return whether one of the names has a right, or who shows none has it."""
        return right in self._rights_of(callers)

    def find(self, context: grpc.ServicerContext) -> tuple[str, ...]:
        """Return the names under which a caller is known: of its certificate, of its token.

        Raises:
            UnauthenticatedError: its certificate was revoked, or it shows no token that is good.
            ServiceUnavailableError: nobody can say now whose its token is.

        """
        # The stubs know another type than gRPC has.
        shown: Any = context.auth_context() if self._checks_certificates else {}
        certificate: Mapping[str, Any] = shown
        for text in certificate.get("x509_pem_cert", ()):
            self.check_revoked(ssl.PEM_cert_to_DER_cert(text.decode()))
        return self.name(certificate, context.invocation_metadata())

    def check_revoked(self, certificate: bytes) -> None:
        """Refuse a certificate, in DER, that was revoked.

        Raises:
            UnauthenticatedError: it was.

        """
        if self._revoked is not None:
            self._revoked.check(certificate)

    def name(self, certificate: Mapping[str, Any], metadata: Any) -> tuple[str, ...]:
        """Return the names of a certificate that was checked, as gRPC has it, and of a token.

        Raises:
            as `find`.

        """
        token = None
        if self._tokens is not None and (token := self._tokens.find(metadata)) is None:
            raise no_token()
        return tuple(name for name in (_certified_name(certificate), token) if name)

    def _rights_of(self, callers: tuple[str, ...]) -> frozenset[Right]:
        known = [name for name in callers if name in self._rights]
        names = known or [ANYBODY if callers else ANONYMOUS]
        return frozenset().union(*(self._rights.get(name, frozenset()) for name in names))


def _certified_name(certificate: Mapping[str, Any]) -> str:
    """Return the SPIFFE id of a certificate that was checked, or else its common name."""
    for key in ("peer_spiffe_id", "x509_common_name"):
        for value in certificate.get(key, ()):
            return str(value.decode("utf-8", errors="replace"))
    return ""


def _refusal(name: str, rpc: str, right: Right) -> ForetokenError:
    needs = f"{rpc} needs the right `{right.value}`"
    if name == ANONYMOUS:
        return UnauthenticatedError(
            f"{needs}, and the caller did not say who it is: show a certificate"
            " (client.cert_file) or a token (client.token_file), or let the server grant it:"
            f" server.callers.{ANONYMOUS}"
        )
    return NotAllowedError(
        f"{needs}, which {name} lacks; server.callers says who has which", verb=rpc
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
