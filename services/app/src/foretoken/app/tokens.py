"""Bearer tokens: of a file, of an OpenID provider, of a Kubernetes cluster; each has a name."""

import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import grpc

from foretoken.app.config import ServerConfig
from foretoken.domain.errors import InvalidRequestError, UnauthenticatedError
from foretoken.wire.credential_files import CredentialFiles
from foretoken.wire.errors import error_to_status

_log = logging.getLogger(__name__)

_TOKEN_FILE = "server.token_file"  # noqa: S105 - the name of a setting
_SCHEME = "Bearer "
# Of a line that has a token and no name.
_UNNAMED = "token"
_NUM_WORDS = 2
# How long what somebody else said of a token is believed, in s: so long may one that was revoked
# still be good. Kubernetes' own API server keeps such answers for two minutes.
_BELIEVED_S, _REFUSED_S = 60.0, 10.0
_MAX_REMEMBERED = 10_000
# Longer than tokens are; nobody's checking of what is longer is paid for.
_MAX_TOKEN_CHARS = 16_384


def shown_token(metadata: Any) -> str | None:
    """Return the bearer token in a call's metadata, if there is one."""
    shown = dict(metadata or ()).get("authorization", "")
    text = shown if isinstance(shown, str) else shown.decode("utf-8", errors="replace")
    return text.removeprefix(_SCHEME) if text.startswith(_SCHEME) else None


class Verdict(NamedTuple):
    """Whose a token is, nobody's where `name` is empty, and until when it is, in s since 1970."""

    name: str
    ends_s: float = float("inf")


class TokenSource(Protocol):
    """Somebody who knows tokens; asking may take as long as a call over the network."""

    def check(self, token: str) -> Verdict | None:
        """Return whose a token is; none where it is another source's to say.

        Raises:
            UnauthenticatedError: it was one of this source, and is not good.
            ServiceUnavailableError: the source cannot be asked now.

        """


class FileTokens:
    """Tokens in a file, a line each, with the name of who shows it before it or without."""

    def __init__(self, path: str) -> None:
        """Read the file; it is read again when it changes.

        Raises:
            InvalidRequestError: the file cannot be read, is empty or is no list of tokens.

        """
        self._files = CredentialFiles({_TOKEN_FILE: path})
        self._names = self._read()
        self._lock = threading.Lock()

    def find(self, token: str) -> str | None:
        """Return the name of who has a token."""
        given = token.encode()
        self._renew()
        # In constant time, so that answers do not tell how much of a guess was right.
        found = [name for known, name in self._names.items() if hmac.compare_digest(given, known)]
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


class Tokens:
    """Whose a token is, by a file and by further sources, whose answers are remembered."""

    def __init__(
        self,
        file: FileTokens | None,
        sources: tuple[TokenSource, ...] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Keep whom to ask; `clock` gives the s since 1970."""
        self._file = file
        self._sources = sources
        self._clock = clock
        self._lock = threading.Lock()
        # By the SHA-256 of a token: whose it is, why it is refused, and until when that holds.
        self._remembered: dict[bytes, tuple[str, str, float]] = {}

    @classmethod
    def of(cls, config: ServerConfig) -> "Tokens | None":
        """Return what a server's configuration says; none where it knows no tokens.

        Raises:
            InvalidRequestError: a file cannot be used, or a package is missing.

        """
        sources: list[TokenSource] = []
        if config.oidc is not None:
            from foretoken.app.oidc import OidcTokens

            sources.append(OidcTokens(config.oidc))
        if config.token_review is not None:
            from foretoken.app.token_review import ReviewedTokens

            sources.append(ReviewedTokens(config.token_review))
        file = FileTokens(config.token_file) if config.token_file else None
        return cls(file, tuple(sources)) if file or sources else None

    @property
    def may_wait(self) -> bool:
        """Whether whose a token is may have to be asked over the network."""
        return bool(self._sources)

    def may_know(self, metadata: Any) -> bool:
        """Return whether a call shows a token that may be known, without asking anybody."""
        token = shown_token(metadata)
        return token is not None and (self.may_wait or self._find_in_file(token) is not None)

    def find(self, metadata: Any) -> str | None:
        """Return the name of who shows a token in a call's metadata.

        Raises:
            UnauthenticatedError: the token was good once, or is for others.
            ServiceUnavailableError: nobody can say now whose it is.

        """
        token = shown_token(metadata)
        if token is None:
            return None
        return self._find_in_file(token) or self._find_elsewhere(token)

    def _find_in_file(self, token: str) -> str | None:
        return self._file.find(token) if self._file is not None else None

    def _find_elsewhere(self, token: str) -> str | None:
        if not self._sources or len(token) > _MAX_TOKEN_CHARS:
            return None
        key, now_s = hashlib.sha256(token.encode()).digest(), self._clock()
        name, problem, ends_s = self._remembered.get(key, ("", "", 0.0))
        if ends_s <= now_s:
            name, problem = "", ""
            ends_s = now_s + _REFUSED_S
            try:
                if (verdict := self._ask(token)) is not None:
                    name, ends_s = verdict.name, min(verdict.ends_s, now_s + _BELIEVED_S)
            except UnauthenticatedError as err:
                problem = err.message
            self._remember(key, (name, problem, ends_s))
        if problem:
            raise UnauthenticatedError(problem)
        return name or None

    def _ask(self, token: str) -> Verdict | None:
        for source in self._sources:
            if (verdict := source.check(token)) is not None:
                return verdict
        return None

    def _remember(self, key: bytes, answer: tuple[str, str, float]) -> None:
        with self._lock:
            if len(self._remembered) >= _MAX_REMEMBERED:
                now_s = self._clock()
                kept = {k: known for k, known in self._remembered.items() if known[2] > now_s}
                # Many tokens that nobody knows, as of an attack: asked again is better than full.
                self._remembered = kept if len(kept) < _MAX_REMEMBERED else {}
            self._remembered[key] = answer


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without a token before they have a thread, all but those for health.

    Where others must be asked whose a token is, that is done in the call's own thread.
    """

    def __init__(self, tokens: Tokens, is_open: Callable[[str], bool]) -> None:
        """Keep what tokens there are, and which methods anybody may call."""
        self._tokens = tokens
        self._is_open = is_open

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Pass the call on, or answer it with UNAUTHENTICATED."""
        handler = continuation(handler_call_details)
        # A method that does not exist stays so: an answer of ours would make it one, and every name
        # that anybody makes up a series of the metrics.
        if handler is None or self._is_open(handler_call_details.method):
            return handler
        if self._tokens.may_know(handler_call_details.invocation_metadata):
            return handler
        # On the wire a single message is a stream of one, so this refuses every kind of call.
        return grpc.stream_stream_rpc_method_handler(_refuse)


def no_token() -> UnauthenticatedError:
    """Return the error of a call without a token that the server knows."""
    return UnauthenticatedError(
        "this service wants a token: name the file that holds it in client.token_file"
    )


def _refuse(_requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    context.abort_with_status(error_to_status(no_token()))
    yield
