"""What is written for asyncio runs without an event loop, where nothing waits for one."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from foretoken.client.blocking import complete, each, iterate


class _Numbers:
    """Yields numbers, and notes that it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    async def items(self, num: int) -> AsyncGenerator[int]:
        try:
            for number in range(num):
                yield number
        finally:
            self.is_closed = True


def test_work_that_never_waits_is_completed() -> None:
    async def double(number: int) -> int:
        return 2 * number

    async def work() -> int:
        return await double(await double(1))

    assert 4 == complete(work())


def test_errors_of_the_work_are_raised() -> None:
    async def work() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        complete(work())


def test_work_that_waits_for_an_event_loop_is_refused_and_ended() -> None:
    is_ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            is_ended.append(True)

    with pytest.raises(RuntimeError, match="event loop"):
        complete(work())
    assert [True] == is_ended


def test_items_come_as_they_are_taken() -> None:
    numbers = _Numbers()
    taken = iterate(numbers.items(3))
    assert 0 == next(taken)
    assert not numbers.is_closed
    assert [1, 2] == list(taken)
    assert numbers.is_closed


def test_leaving_early_closes_what_yields() -> None:
    numbers = _Numbers()
    taken = iterate(numbers.items(3))
    next(taken)
    taken.close()
    assert numbers.is_closed


def test_being_forgotten_closes_what_yields() -> None:
    """A caller that breaks off a loop over a watch ends the call."""
    numbers = _Numbers()
    for number in iterate(numbers.items(3)):
        assert 0 == number
        break
    assert numbers.is_closed


def test_it_works_within_a_running_event_loop() -> None:
    """Blocking clients may be used there, too, at the caller's risk."""

    async def scene() -> list[int]:
        return list(iterate(each([1, 2])))

    assert [1, 2] == asyncio.run(scene())


def test_items_of_either_kind_are_yielded() -> None:
    assert [0, 1] == list(iterate(each(_Numbers().items(2))))
    assert [5] == list(iterate(each([5])))
