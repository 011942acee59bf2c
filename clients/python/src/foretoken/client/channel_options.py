"""How to reach a service; apart from the connection, for who reads options needs no gRPC."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from foretoken.domain.errors import InvalidRequestError
from foretoken.wire.keepalive import KEEPALIVE_S, MIN_INTERVAL_S

_LONGEST_DELAY_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelOptions:
    """How to reach a service.

    `address` is a gRPC target (`localhost:50051`, `dns:///predictor:50051`; the latter spreads
    calls over all pods behind the name). A unary call may take `deadline_s`; `stream_deadline_s`
    bounds one stream of rows or job states, and a call that reads all rows; a longer job is watched
    by several streams. A stream that breaks is taken up again `max_reconnects` times in a row, for
    some two minutes: so long may a restart take. A call that a busy server refuses is made again
    within its deadline. Every `keepalive_s` a quiet connection is pinged.
    `use_tls` follows from any TLS file: `ca_file` checks the server (empty: the system's
    authorities), `cert_file` and `key_file` say who we are. `token_file` holds a bearer token,
    which only travels over TLS.
    """

    address: str
    deadline_s: float = 30.0
    stream_deadline_s: float = 600.0
    max_reconnects: int = 15
    reconnect_delay_s: float = 0.5
    keepalive_s: float = KEEPALIVE_S
    use_tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        """Check what servers would answer by ending the connection."""
        if self.keepalive_s < MIN_INTERVAL_S:
            raise InvalidRequestError.of_field(
                "keepalive_s", f"servers take a ping every {MIN_INTERVAL_S:.0f} s at most"
            )

    def in_the_clear(self) -> "ChannelOptions":
        """Return the same without TLS and token: for a socket that only its user can reach."""
        return replace(self, use_tls=False, ca_file="", cert_file="", key_file="", token_file="")

    def delay_after(
        self, num_losses: int, at_least_s: float = 0.0, draw: Callable[[], float] = random.random
    ) -> float:
        """Return the seconds to wait after so many broken or refused streams in a row.

        They double up to 10, or are what the server asked for, and up to half of that more, so that
        clients which were turned away together do not come back together.
        """
        doubled_s = min(self.reconnect_delay_s * 2.0 ** max(num_losses - 1, 0), _LONGEST_DELAY_S)
        return max(doubled_s, at_least_s) * (1.0 + draw() / 2)
