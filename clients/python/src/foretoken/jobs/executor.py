"""Where the tasks of long work are done: the contract of `executors/`."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")

# An item whose worker died is begun so often before its run fails: once more may be bad luck, but
# an item that needs more memory than there is kills each worker it is given to.
MAX_ATTEMPTS = 3
# How often a run that waits for results looks whether it is still wanted.
CHECK_PERIOD_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCounts:
    """Workers that are there now, and how many were started for one that died."""

    num_alive: int = 0
    num_restarts: int = 0


def keep_going() -> None:
    """Want every result: the `check` of a run that nobody cancels."""


def check_importable(function: Callable[..., object]) -> None:
    """Refuse a function that other processes cannot import.

    Raises:
        TypeError: it is none of a module's own.

    """
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise TypeError(
            f"{function.__qualname__} must be defined at the top of a module that workers import,"
            " not in a program's main module nor in another function"
        )


def pack_function(function: Callable[[T, S], R], shared: S) -> bytes:
    """Return a function and what its items share, to be sent to workers.

    Raises:
        TypeError: the function is none that another process can import.

    """
    check_importable(function)
    return pickle.dumps((function, shared), pickle.HIGHEST_PROTOCOL)


class Executor(Protocol):
    """Runs tasks in other processes; several runs may share one and get equal turns."""

    @property
    def num_workers(self) -> int:
        """Tasks that run at once."""

    @property
    def workers(self) -> WorkerCounts:
        """Workers that are there, and how many were started for one that died."""

    def run(
        self,
        function: Callable[[T, S], R],
        items: Sequence[T],
        shared: S,
        check: Callable[[], None] = keep_going,
    ) -> Iterator[tuple[int, R]]:
        """Yield the index and result of every item as it is done, in any order.

        `function` is a module's own; it, items, `shared` (sent to a worker once) and results can be
        pickled, and a result depends on nothing else, so it is the same wherever it was computed.
        An item whose worker died is done again by another. Closing the iterator drops what waits.
        `check` is called several times a second while results are awaited; what it raises ends
        the run.

        Raises:
            ForetokenError: whatever the function raises.
            ServiceUnavailableError: workers die wherever they are started.

        """

    def close(self) -> None:
        """Let the workers go; runs that wait for results fail."""
