"""What both ends of a connection say about it: sizes of messages, and pings.

Each end pings a connection with calls under way that is quiet for its keepalive time, and takes
it for dead where no answer comes within `TIMEOUT_S`. A server that is pinged more often than every
`MIN_INTERVAL_S` ends the connection with "too many pings", so that no client may be set to that.
"""

MAX_MESSAGE_BYTES = 16 * 2**20

# A ping a minute keeps the entries of NAT and of load balancers, which live five minutes and more.
KEEPALIVE_S = 60.0
TIMEOUT_S = 20.0
MIN_INTERVAL_S = 10.0

Options = tuple[tuple[str, int], ...]

_BOTH: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_timeout_ms", int(TIMEOUT_S * 1_000)),
    # A watch is quiet for hours: gRPC would stop to ping after the second time.
    ("grpc.http2.max_pings_without_data", 0),
)

# Give these to every `grpc.server`.
SERVER_OPTIONS: Options = (
    *_BOTH,
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1_000)),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", int(MIN_INTERVAL_S * 1_000)),
)


def client_options(keepalive_s: float) -> Options:
    """Return the same for a channel that pings so often."""
    return (*_BOTH, ("grpc.keepalive_time_ms", int(keepalive_s * 1_000)))


def age_options(max_age_s: float, grace_s: float) -> Options:
    """Return how a server ends old connections, so that clients look for its neighbours again.

    From `max_age_s` on, give or take a tenth, a connection takes no new call, and those that run
    get `grace_s` more. 0 lets connections live for ever.
    """
    if not max_age_s:
        return ()
    return (
        ("grpc.max_connection_age_ms", int(max_age_s * 1_000)),
        ("grpc.max_connection_age_grace_ms", int(grace_s * 1_000)),
    )
