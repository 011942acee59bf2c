"""Tokens of an OpenID provider: signed by it, for this service, and not too old."""

import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from foretoken.app.config import OidcConfig
from foretoken.app.tokens import Verdict
from foretoken.domain.errors import (
    InvalidRequestError,
    ServiceUnavailableError,
    UnauthenticatedError,
)

# Those with a key that the provider keeps to itself. Source: RFC 7518, section 3.1, and RFC 8037;
# not "none", and none whose key both sides would have to know.
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512",
               "ES256", "ES384", "ES512", "EdDSA")  # fmt: skip
# A provider's clock and this one's may differ so much, in s.
_LEEWAY_S = 30
_TIMEOUT_S = 5.0
# Keys are looked at again so often, in s, and where a token names one that is not there, but not
# more often than that: anybody may make up such names.
_KEYS_S, _UNKNOWN_KEY_S = 300.0, 10.0
_MAX_ANSWER_BYTES = 2**20


class OidcTokens:
    """Checks the tokens of one issuer by its keys (JWKS); a `TokenSource`."""

    def __init__(self, config: OidcConfig) -> None:
        """Keep who issues; its keys are fetched with the first token.

        Raises:
            InvalidRequestError: PyJWT is not installed, or the file of authorities cannot be used.

        """
        try:
            import jwt
        except ModuleNotFoundError as err:
            raise InvalidRequestError.of_field(
                "server.oidc", f"needs {err.name}: pip install 'foretoken[oidc]'"
            ) from err
        self._jwt: Any = jwt
        self._config = config
        try:
            self._tls = ssl.create_default_context(cafile=config.ca_file or None)
        except (OSError, ssl.SSLError) as err:
            raise InvalidRequestError.of_field("server.oidc.ca_file", f"{err}") from err
        self._lock = threading.Lock()
        self._keys: dict[str, Any] = {}
        self._fetched_s = float("-inf")

    def check(self, token: str) -> Verdict | None:
        """Return whose a token of this issuer is; none for one of another issuer, or of no kind.

        Raises:
            UnauthenticatedError: it is this issuer's, and is too old, for others, or forged.
            ServiceUnavailableError: the issuer's keys cannot be fetched.

        """
        jwt, config = self._jwt, self._config
        try:
            shown = jwt.decode(token, options={"verify_signature": False})
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            return None
        if shown.get("iss") != config.issuer:
            return None
        key = self._find_key(str(header.get("kid", "")))
        if key is None:
            raise UnauthenticatedError("the token is refused: its key is none of its issuer's")
        try:
            claims = jwt.decode(
                token,
                key=key,
                algorithms=_ALGORITHMS,
                audience=config.audience,
                issuer=config.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", config.name_claim]},
            )
        except jwt.PyJWTError as err:
            raise UnauthenticatedError(f"the token is refused: {err}") from err
        name = f"{config.prefix}{claims[config.name_claim]}"
        return Verdict(name, float(claims["exp"]) + _LEEWAY_S)

    def _find_key(self, key_id: str) -> Any:
        with self._lock:
            age_s = time.monotonic() - self._fetched_s
            is_known = key_id in self._keys
            if age_s > (_KEYS_S if is_known else _UNKNOWN_KEY_S):
                try:
                    self._keys = self._fetch_keys()
                except (OSError, ValueError, self._jwt.PyJWTError) as err:
                    # Keys that are known stay good while the provider is away.
                    if not is_known:
                        raise ServiceUnavailableError(
                            f"the keys of {self._config.issuer} cannot be fetched: {err}"
                        ) from err
                self._fetched_s = time.monotonic()
            return self._keys.get(key_id)

    def _fetch_keys(self) -> dict[str, Any]:
        uri = self._config.jwks_uri
        if not uri:
            issuer = self._config.issuer.rstrip("/")
            found = self._fetch(f"{issuer}/.well-known/openid-configuration")
            if found.get("issuer") != self._config.issuer:
                raise ValueError(f"it says it is {found.get('issuer')}")
            uri = str(found["jwks_uri"])
        keys = self._jwt.PyJWKSet.from_dict(self._fetch(uri)).keys
        return {str(key.key_id or ""): key for key in keys if key.public_key_use in (None, "sig")}

    def _fetch(self, uri: str) -> dict[str, Any]:
        if not uri.startswith("https://"):
            raise ValueError(f"{uri} is not https")
        with urllib.request.urlopen(uri, timeout=_TIMEOUT_S, context=self._tls) as answer:  # noqa: S310
            content = json.loads(answer.read(_MAX_ANSWER_BYTES))
        if not isinstance(content, dict):
            raise ValueError(f"{uri} answers no object")  # noqa: TRY004 - not a type of ours
        return content
