"""Who calls a server, what they may call, and a log of what they changed."""

import hmac
import ipaddress
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from foretoken.app.config import ServerConfig
from foretoken.app.telemetry.call_log import note_caller
from foretoken.domain.caller import answering
from foretoken.domain.errors import (
    ForetokenError,
    InvalidRequestError,
    NotAllowedError,
    UnauthenticatedError,
)
from foretoken.wire.credential_files import CredentialFiles
from foretoken.wire.errors import error_to_status
from foretoken.wire.rights import Right, rights_of
from foretoken.wire.rpcs import TABLES

_log = logging.getLogger(__name__)
_audit = logging.getLogger("foretoken.audit")

ANONYMOUS, ANYBODY = "anonymous", "*"
_TOKEN_FILE = "server.token_file"  # noqa: S105 - the name of a setting
_SCHEME = "Bearer "
# Of a line that has a token and no name.
_UNNAMED = "token"
_NUM_WORDS = 2
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


class Tokens:
    """Bearer tokens in a file, a line each, with the name of who shows it before it or without."""

    def __init__(self, path: str) -> None:
        """Read the file; it is read again when it changes.

        Raises:
            InvalidRequestError: the file cannot be read, is empty or is no list of tokens.

        """
        self._files = CredentialFiles({_TOKEN_FILE: path})
        self._names = self._read()
        self._lock = threading.Lock()

    def find(self, metadata: Any) -> str | None:
        """Return the name of who shows one of the tokens in a call's metadata."""
        shown = dict(metadata or ()).get("authorization", "")
        text = shown if isinstance(shown, str) else shown.decode("utf-8", errors="replace")
        if not text.startswith(_SCHEME):
            return None
        given = text.removeprefix(_SCHEME).encode()
        self._renew()
        # In constant time, so that answers do not tell how much of a guess was right.
        found = [name for token, name in self._names.items() if hmac.compare_digest(given, token)]
        return found[0] if found else None

    def _renew(self) -> None:
        with self._lock:
            if self._files.has_changed():
                try:
                    self._names = self._read()
                except InvalidRequestError as err:
                    _log.warning("the tokens stay as they were: %s", err.message)

    def _read(self) -> Mapping[bytes, str]:
        names: dict[bytes, str] = {}
        for number, line in enumerate(self._files.read()[_TOKEN_FILE].splitlines(), 1):
            words = line.split()
            if len(words) > _NUM_WORDS:
                raise InvalidRequestError.of_field(
                    _TOKEN_FILE, f"line {number} is neither a token nor a name and a token"
                )
            if words:
                name = words[0] if len(words) == _NUM_WORDS else _UNNAMED.encode()
                names[words[-1]] = name.decode("utf-8", errors="replace")
        if not names:
            raise InvalidRequestError.of_field(_TOKEN_FILE, "the file is empty")
        return names


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

    @classmethod
    def of(cls, config: ServerConfig, tokens: Tokens | None) -> "Access":
        """Return what a server's configuration says.

        Raises:
            InvalidRequestError: no such role.

        """
        return cls(
            config.callers,
            tokens,
            checks_certificates=bool(config.tls_client_ca_file),
            is_local=is_loopback(config.host),
        )

    @contextmanager
    def admit(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        """Let a call over gRPC run, as `enter` does."""
        if is_open(method):
            yield
            return
        with self.enter(method, self.find(context), context.peer()):
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
        """Return the names under which a caller is known: of its certificate, of its token."""
        certificate = context.auth_context() if self._checks_certificates else {}
        return self.name(certificate, context.invocation_metadata())

    def name(self, certificate: Mapping[str, Any], metadata: Any) -> tuple[str, ...]:
        """Return the names of a certificate that was checked, as gRPC has it, and of a token."""
        token = self._tokens.find(metadata) if self._tokens else None
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


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without a token before they have a thread, all but those for health."""

    def __init__(self, tokens: Tokens) -> None:
        """Keep what tokens there are."""
        self._tokens = tokens

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Pass the call on, or answer it with UNAUTHENTICATED."""
        handler = continuation(handler_call_details)
        # A method that does not exist stays so: an answer of ours would make it one, and every name
        # that anybody makes up a series of the metrics.
        if handler is None or is_open(handler_call_details.method):
            return handler
        if self._tokens.find(handler_call_details.invocation_metadata) is not None:
            return handler
        # On the wire a single message is a stream of one, so this refuses every kind of call.
        return grpc.stream_stream_rpc_method_handler(_refuse)


def _refuse(_requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    error = UnauthenticatedError(
        "this service wants a token: name the file that holds it in client.token_file"
    )
    context.abort_with_status(error_to_status(error))
    yield
