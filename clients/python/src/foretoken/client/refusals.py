"""How long to wait where a busy server refused a call."""

import time
from collections.abc import Callable

from foretoken.client.channel_options import ChannelOptions
from foretoken.domain.errors import ForetokenError, ServerBusyError


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
        if delay_s >= self.left_s:
            raise error
        return delay_s
