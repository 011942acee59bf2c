"""Run what is written for asyncio without an event loop, where nothing of it ever waits for one.

Calls are written once, with `await`. Over a blocking connection whatever they await is done when it
is asked for, so a single step brings them to their end.
"""

from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns.

    Raises:
        RuntimeError: it waited for an event loop.

    """
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    work.close()
    raise RuntimeError("what a blocking connection does must not wait for an event loop")


def iterate(items: AsyncGenerator[T]) -> Generator[T]:
    """Yield the items; closing this closes them."""
    try:
        while True:
            try:
                item = complete(anext(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        complete(items.aclose())


async def each(items: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T]:
    """Yield the items of either kind."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
