"""Streams that break: how often in a row, and how long to wait before the next."""

import pytest

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.losses import LossCount
from foretoken.domain.errors import QueueFullError, ServiceUnavailableError

_OPTIONS = ChannelOptions(address="localhost:1", max_reconnects=3, reconnect_delay_s=0.5)


def _lose(losses: LossCount, num_times: int) -> None:
    for _ in range(num_times):
        losses.add(ServiceUnavailableError("gone"))


@pytest.mark.parametrize("error", [ServiceUnavailableError("gone"), QueueFullError("full")])
def test_a_stream_may_break_so_often_in_a_row_and_no_more(
    error: ServiceUnavailableError | QueueFullError,
) -> None:
    losses = LossCount(_OPTIONS)
    _lose(losses, 3)
    with pytest.raises(type(error)) as caught:
        losses.add(error)
    assert caught.value is error


def test_losses_before_something_arrived_do_not_count() -> None:
    losses = LossCount(_OPTIONS)
    for _ in range(2):
        _lose(losses, 3)
        losses.forget()
    _lose(losses, 3)
    with pytest.raises(ServiceUnavailableError):
        _lose(losses, 1)


def test_the_wait_doubles_with_every_loss_in_a_row() -> None:
    losses = LossCount(_OPTIONS)
    waits = []
    for _ in range(3):
        _lose(losses, 1)
        waits.append(losses.delay_s)
    assert all(
        doubled <= wait <= 1.5 * doubled
        for doubled, wait in zip([0.5, 1.0, 2.0], waits, strict=True)
    )
    losses.forget()
    _lose(losses, 1)
    assert 0.5 <= losses.delay_s <= 0.75
