"""A small service whose jobs are searches, to be killed: `python -m search_service FOLDER CALLS`.

It prints the name of its job, and then a line for every item that is done.
"""

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import search_tasks

from foretoken.domain.requests.search import Finalist
from foretoken.jobs.executor import Executor
from foretoken.jobs.executors.local import LocalExecutor
from foretoken.jobs.runner import JobProgress, JobRunner, Work
from foretoken.simulator.search.context import JobContext

KIND = "search"
# So many that it is killed long before the last, on a busy machine too.
NUM_ITEMS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Items to do, and the folder where the number of calls of each is counted."""

    num_items: int
    calls: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The results, by item."""

    results: tuple[int, ...]


class SearchService:
    """Jobs on an executor. Items are published as finalists."""

    def __init__(self, folder: Path, executor: Executor) -> None:
        self.executor = executor
        self.runner = JobRunner(folder, num_workers=2)
        self.order: list[tuple[str, int]] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def open(self) -> None:
        """Go on with what was left."""
        self.runner.open({KIND: self.make_work})

    def close(self) -> None:
        """Stop."""
        self.may_end.set()
        self.runner.close()
        self.executor.close()

    def create(self, question: Question) -> str:
        """Start a search and return the name of its job."""
        plain = {"num_items": question.num_items, "calls": question.calls}
        return self.runner.create(KIND, self.make_work(plain), question).job_id

    def make_work(self, plain: Any) -> Work:
        """Return the work of a question as plain data."""

        def work(progress: JobProgress) -> Answer:
            found = {}
            items = range(plain["num_items"])
            with JobContext(self.executor, progress) as context:
                for index, result in context.run(search_tasks.count_slowly, items, plain["calls"]):
                    found[index] = result
                    context.publish(Finalist(candidate=index, name=f"item {index}"))
                    context.update(len(found) / len(items), f"{len(found)} of {len(items)}")
                    self.order.append((progress.job_id, index))
                    print(index, flush=True)  # noqa: T201
            self.may_end.wait()
            return Answer(results=tuple(found[index] for index in items))

        return work


if __name__ == "__main__":
    service = SearchService(Path(sys.argv[1]), LocalExecutor(2))
    service.open()
    print(service.create(Question(num_items=NUM_ITEMS, calls=sys.argv[2])), flush=True)  # noqa: T201
    threading.Event().wait()
