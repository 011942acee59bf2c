"""How long clients wait for busy servers, and how often they ping them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.client.channel import channel_arguments
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.retries import Refusals
from foretoken.domain.errors import InvalidRequestError, QueueFullError, ServerBusyError
from foretoken.wire.keepalive import SERVER_OPTIONS, age_options

_ADDRESS = "localhost:1"


def test_a_client_pings_no_more_often_than_servers_take() -> None:
    """Else they end the connection with "too many pings"; the least that is legal is taken."""
    server = dict(SERVER_OPTIONS)
    least_ms = server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert 10_000 == least_ms
    for options in (
        ChannelOptions(address=_ADDRESS),
        ChannelOptions(address=_ADDRESS, keepalive_s=least_ms / 1_000),
    ):
        client = dict(channel_arguments(options))
        assert client["grpc.keepalive_time_ms"] >= least_ms
        for name in (
            "grpc.keepalive_timeout_ms",
            "grpc.http2.max_pings_without_data",
            "grpc.max_receive_message_length",
            "grpc.max_send_message_length",
        ):
            assert client[name] == server[name]


def test_a_client_cannot_be_set_to_more() -> None:
    with pytest.raises(InvalidRequestError, match="every 10 s at most"):
        ChannelOptions(address=_ADDRESS, keepalive_s=9.9)


def test_connections_live_for_ever_or_have_an_age() -> None:
    assert () == age_options(0.0, 5.0)
    assert {
        "grpc.max_connection_age_ms": 1_500,
        "grpc.max_connection_age_grace_ms": 5_000,
    } == dict(age_options(1.5, 5.0))


@given(
    st.integers(0, 50),
    st.floats(0.0, 100.0),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_who_was_turned_away_waits_as_asked_and_up_to_half_more(
    num_losses: int, at_least_s: float, drawn: float
) -> None:
    options = ChannelOptions(address=_ADDRESS, reconnect_delay_s=0.5)
    delay_s = options.delay_after(num_losses, at_least_s, lambda: drawn)
    doubled_s = min(0.5 * 2.0 ** max(num_losses - 1, 0), 10.0)
    expected = max(doubled_s, at_least_s) * (1.0 + drawn / 2)
    assert math.isclose(expected, delay_s)


def test_refusals_end_with_the_deadline() -> None:
    """A wait that would outlast it is not begun: the caller hears of the refusal itself."""
    now_s = 100.0
    refusals = Refusals(ChannelOptions(address=_ADDRESS), 10.0, lambda: now_s)
    busy = ServerBusyError("busy", 4.0)
    assert 4.0 <= refusals.delay_after(busy) <= 6.0
    now_s = 107.0
    assert 3.0 == refusals.left_s
    with pytest.raises(ServerBusyError) as caught:
        refusals.delay_after(busy)
    assert busy is caught.value
    now_s = 200.0
    assert 0.0 == refusals.left_s


def test_other_errors_are_no_refusals() -> None:
    """A full queue of jobs empties in minutes: its caller decides."""
    full = QueueFullError("64 jobs wait already")
    with pytest.raises(QueueFullError) as caught:
        Refusals(ChannelOptions(address=_ADDRESS), 10.0).delay_after(full)
    assert full is caught.value
