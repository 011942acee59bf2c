"""Items that come one by one, for as long as somebody wants them."""

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, Self, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Watch(Protocol[T_co]):
    """Items as they come; `close` ends it.

    That of a service may be closed by another thread, also while one waits for the next item.
    """

    def __iter__(self) -> Iterator[T_co]:
        """Return the watch itself."""

    def __next__(self) -> T_co:
        """Return the next item, when there is one."""

    def close(self) -> None:
        """Want no more: who waits for the next item finds the end."""


class WakingWatch(Generic[T]):
    """A watch over `items`, whose waiting ends where `wake` is called."""

    def __init__(self, items: Iterator[T], wake: Callable[[], None]) -> None:
        """Keep both."""
        self._items = items
        self._wake = wake

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> T:
        """Return the next item, when there is one."""
        return next(self._items)

    def close(self) -> None:
        """Want no more, from any thread."""
        self._wake()
