"""Tokens of a Kubernetes cluster: its API server says whose they are (TokenReview)."""

import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

from foretoken.app.config import TokenReviewConfig
from foretoken.app.tokens import Verdict
from foretoken.domain.errors import InvalidRequestError, ServiceUnavailableError
from foretoken.wire.credential_files import CredentialFiles

_PATH = "/apis/authentication.k8s.io/v1/tokenreviews"
_SETTING = "server.token_review.token_file"
_TIMEOUT_S = 5.0
_CREATED = 201
_MAX_ANSWER_BYTES = 2**20


class ReviewedTokens:
    """Lets the API server check tokens; a `TokenSource`.

    Names are those of Kubernetes: `system:serviceaccount:NAMESPACE:NAME` of a service account.
    """

    def __init__(self, config: TokenReviewConfig) -> None:
        """Keep how to reach it.

        Raises:
            InvalidRequestError: the file of its authority cannot be used, or the address is none.

        """
        self._config = config
        self._own = CredentialFiles({_SETTING: config.token_file})
        address = urlsplit(config.api_server)
        if address.scheme != "https" or not address.hostname:
            raise InvalidRequestError.of_field(
                "server.token_review.api_server", f"{config.api_server} is not https://HOST:PORT"
            )
        self._host, self._port = address.hostname, address.port or 443
        try:
            self._tls = ssl.create_default_context(cafile=config.ca_file or None)
        except (OSError, ssl.SSLError) as err:
            raise InvalidRequestError.of_field("server.token_review.ca_file", f"{err}") from err

    def check(self, token: str) -> Verdict | None:
        """Return whose a token is; none where the cluster does not know it or it is for others.

        Raises:
            ServiceUnavailableError: the API server does not answer, or does not let us ask.

        """
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": list(self._config.audiences)},
        }
        status = self._post(review).get("status", {})
        if not status.get("authenticated"):
            return None
        wanted = set(self._config.audiences)
        # A server that knows no audiences says none, and would accept a token for anybody.
        if wanted and not wanted & set(status.get("audiences") or ()):
            return None
        name = str(status.get("user", {}).get("username", ""))
        return Verdict(name) if name else None

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=_TIMEOUT_S, context=self._tls
        )
        try:
            own = self._own.read()[_SETTING].decode().strip()
            headers = {"Authorization": f"Bearer {own}", "Content-Type": "application/json"}
            connection.request("POST", _PATH, json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read(_MAX_ANSWER_BYTES)
            if answer.status != _CREATED:
                raise ServiceUnavailableError(
                    f"the API server does not review tokens ({answer.status}); its service account"
                    " needs the ClusterRole system:auth-delegator"
                )
            found = json.loads(content)
        except (OSError, ValueError, http.client.HTTPException) as err:
            raise ServiceUnavailableError(f"the API server cannot be asked: {err}") from err
        finally:
            connection.close()
        return found if isinstance(found, dict) else {}
