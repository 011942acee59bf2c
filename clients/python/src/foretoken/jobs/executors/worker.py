"""A worker process of the local executor: takes tasks from its input, answers on its output.

Run as a program of its own, and not forked or spawned by multiprocessing: threads and gRPC of the
parent are of no concern, and the parent's main module is not run again.
"""

import gc
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import IO, Any

from foretoken.jobs.executors.outcome import attempt
from foretoken.jobs.process_setup import collect_rarely, take_as_ours

# What the parent says: ("start", run, pickled function and shared), ("task", run, pickled item) and
# ("forget", run). A task is answered by an Outcome.
START, TASK, FORGET = "start", "task", "forget"
# How often a worker looks whether its parent is there; an idle one learns at once that it is not.
_PARENT_PERIOD_S = 0.5
# Where processors are short the parent, which answers callers, goes first: 2 ms of work next to two
# busy workers took 6 ms in the median instead of 10, on a machine with much else to do; 10 gains
# no more.
_NICENESS = 5


def work(messages: Iterator[tuple[Any, ...]], answers: IO[bytes]) -> None:
    """Do tasks until there are no more messages."""
    runs: dict[int, tuple[Any, Any]] = {}
    packed: dict[int, bytes] = {}
    for kind, run, *content in messages:
        if kind == START:
            packed[run] = content[0]
        elif kind == FORGET:
            runs.pop(run, None)
            packed.pop(run, None)
            # What is left of it is garbage.
            gc.unfreeze()
        else:
            outcome = attempt(partial(_do, run, content[0], runs, packed))
            pickle.dump(outcome, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
            # What a task leaves may be large, such as arrays of objects that refer to each other.
            # What it imported stays: to look through that after every task takes as long as to
            # train a series.
            gc.collect()
            gc.freeze()


def _do(
    run: int, item: bytes, runs: dict[int, tuple[Any, Any]], packed: dict[int, bytes]
) -> object:
    # Unpacked here, where an error of it is the task's: a module that cannot be imported.
    if run not in runs:
        runs[run] = pickle.loads(packed[run])  # noqa: S301 - our own parent's
        packed[run] = b""
    function, shared = runs[run]
    return function(pickle.loads(item), shared)  # noqa: S301


def _read(tasks: IO[bytes]) -> Iterator[tuple[Any, ...]]:
    """Yield what the parent says until it has closed the input or is gone."""
    while True:
        try:
            yield pickle.load(tasks)  # noqa: S301 - our own parent's
        except (EOFError, pickle.UnpicklingError):
            return


def _end_with(parent: int) -> None:
    """End this process when its parent has, also in the middle of a task."""
    while os.getppid() == parent:
        time.sleep(_PARENT_PERIOD_S)
    os._exit(0)


def main() -> None:
    """Work until the parent closes the input or dies."""
    collect_rarely()
    take_as_ours()
    os.nice(_NICENESS)
    # Ctrl-C goes to every process of a terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    tasks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What a task prints must not get between the answers.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    with suppress(BrokenPipeError):
        work(_read(tasks), answers)
    os._exit(0)


if __name__ == "__main__":
    main()
