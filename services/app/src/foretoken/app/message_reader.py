"""The messages of a stream, waited for no longer than a while each."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from foretoken.domain.errors import StreamIdleError


class MessageReader:
    """Reads a stream of gRPC's in a thread of its own, for its iterator waits without an end.

    One message is read ahead. The thread ends with the call.
    """

    def __init__(
        self,
        messages: Iterator[Any],
        decode: Callable[[Any], Any],
        *,
        first_s: float,
        idle_s: float,
    ) -> None:
        """Keep what is read, and how long to wait for the first message and for another."""
        self._messages = messages
        self._decode = decode
        self._limit_s = first_s
        self._idle_s = idle_s
        self._changed = threading.Condition()
        self._arrived: list[Any] = []
        self._error: BaseException | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        """Begin to read."""
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Want no more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next message.

        Raises:
            StreamIdleError: none came in time.
            InvalidRequestError: what came is no message.

        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived or self._is_over, self._limit_s):
                raise StreamIdleError(
                    f"the stream is ended, for nothing came over it for {self._limit_s:g} s;"
                    " open another when there is something to send"
                )
            self._limit_s = self._idle_s
            if self._arrived:
                self._changed.notify_all()
                return self._decode(self._arrived.pop())
            if self._error is not None:
                raise self._error
            raise StopIteration

    def _read(self) -> None:
        try:
            for message in self._messages:
                with self._changed:
                    self._changed.wait_for(lambda: not self._arrived or self._is_over)
                    if self._is_over:
                        return
                    self._arrived.append(message)
                    self._changed.notify_all()
        except Exception as err:  # noqa: BLE001
            # What gRPC raises where the client left: whoever takes the messages is to hear of it.
            self._error = err
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
