"""Calls refused and streams broken: how often in a row, and how long before the next."""

import time
from collections.abc import Callable

from foretoken.client.channel_options import ChannelOptions
from foretoken.domain.errors import (
    CatalogBusyError,
    ForetokenError,
    ServerBusyError,
    ServiceUnavailableError,
    StreamIdleError,
)
from foretoken.domain.job import Job

# How often a call that changes nothing is made where the service cannot be reached, the first time
# included; the most that gRPC itself does.
MAX_ATTEMPTS = 5


class Refusals:
    """Counts the refusals of one call, which is made again as long as its deadline allows.

    A refused call has not begun, so that any may be made again, also those that create something.
    """

    def __init__(
        self,
        options: ChannelOptions,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with none."""
        self._options = options
        self._clock = clock
        self._ends_at = clock() + deadline_s
        self._num_refusals = 0
        self._num_losses = 0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(self._ends_at - self._clock(), 0.0)

    def delay_after(self, error: ForetokenError) -> float:
        """Return the seconds to wait before the next try.

        Raises:
            ForetokenError: the same, where it is no refusal or too little time is left.

        """
        if not isinstance(error, ServerBusyError):
            raise error
        self._num_refusals += 1
        delay_s = self._options.delay_after(self._num_refusals, error.retry_after_s)
        return self._within_deadline(delay_s, error)

    def delay_after_loss(self, error: ServiceUnavailableError | CatalogBusyError) -> float:
        """Return the seconds to wait before the next try of a stream of which nothing came.

        gRPC's own retries must not: where the last of them finds no connection, it never ends what
        waits for the first message of a stream whose first try was sent.

        Raises:
            ServiceUnavailableError, CatalogBusyError: the same, where it was tried often enough or
                too little time is left.

        """
        self._num_losses += 1
        if self._num_losses >= MAX_ATTEMPTS:
            raise error
        return self._within_deadline(self._options.delay_after(self._num_losses), error)

    def _within_deadline(self, delay_s: float, error: ForetokenError) -> float:
        if delay_s >= self.left_s:
            raise error
        return delay_s


class LossCount:
    """How often a stream broke or was refused in a row, and how long to wait before the next."""

    def __init__(self, options: ChannelOptions) -> None:
        """Begin with none."""
        self._options = options
        self.forget()

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next stream, doubling with every loss in a row."""
        return self._options.delay_after(self._num_losses, self._retry_after_s)

    def forget(self) -> None:
        """Begin anew, as something has arrived."""
        self._num_losses = 0
        self._retry_after_s = 0.0

    def refuse(self, error: ServerBusyError) -> None:
        """Take note of how long a busy server wants to be left alone."""
        self._retry_after_s = error.retry_after_s

    def add(self, error: ServiceUnavailableError | ServerBusyError) -> None:
        """Take note of a stream that broke or was refused, or was ended for want of news.

        Raises:
            ServiceUnavailableError, ServerBusyError: the same, when it was too often in a row.

        """
        if isinstance(error, StreamIdleError):
            self.forget()
            return
        if isinstance(error, ServerBusyError):
            self.refuse(error)
        self._num_losses += 1
        if self._num_losses > self._options.max_reconnects:
            raise error


class WatchState:
    """What a watch has seen over several streams, and how long to wait before the next."""

    def __init__(self, options: ChannelOptions) -> None:
        """Begin with nothing seen."""
        self._losses = LossCount(options)
        self._seen: Job | None = None

    @property
    def is_over(self) -> bool:
        """Whether the final state was seen."""
        return self._seen is not None and self._seen.state.is_final

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next stream, doubling with every loss in a row."""
        return self._losses.delay_s

    def accept(self, job: Job) -> bool:
        """Take note of a state, and return whether it is new."""
        self._losses.forget()
        is_new = job != self._seen
        self._seen = job
        return is_new

    def refuse(self, error: ServerBusyError) -> None:
        """Take note of how long a busy server wants to be left alone."""
        self._losses.refuse(error)

    def lose(self, error: ServiceUnavailableError) -> None:
        """Take note of a broken stream.

        Raises:
            ServiceUnavailableError: the same, when streams broke too often in a row.

        """
        self._losses.add(error)
