"""Run tasks in the caller's thread."""

from collections.abc import Callable, Iterator, Sequence

from foretoken.jobs.executor import R, S, T, WorkerCounts, keep_going


class InlineExecutor:
    """Implements `Executor` without other processes: for tests and little work."""

    @property
    def num_workers(self) -> int:
        """One: the caller."""
        return 1

    @property
    def workers(self) -> WorkerCounts:
        """None but the caller."""
        return WorkerCounts()

    def run(
        self,
        function: Callable[[T, S], R],
        items: Sequence[T],
        shared: S,
        check: Callable[[], None] = keep_going,
    ) -> Iterator[tuple[int, R]]:
        """Yield the index and result of every item, in order."""
        for index, item in enumerate(items):
            check()
            yield index, function(item, shared)

    def close(self) -> None:
        """Do nothing: there are no workers."""
