"""Tasks that workers of a search can import, by what a test wants of them."""

import os
import signal
import time
from pathlib import Path

from foretoken.domain.errors import FieldViolation, InvalidRequestError


def add(item: int, shared: int) -> int:
    """Return the sum."""
    return item + shared


def count_call(item: int, folder: str) -> int:
    """Return the item, and leave a file that says it was done once more."""
    with (Path(folder) / f"{item}").open("a", encoding="utf-8") as file:
        file.write("x")
    return item


def count_slowly(item: int, folder: str) -> int:
    """Return a number of the item, and leave a mark in its file each time it was done."""
    time.sleep(0.01)
    count_call(item, folder)
    return item * item + 1


def meet(_item: int, folder: str) -> int:
    """Return who does it, once another process does it, too; alone it gives up."""
    (Path(folder) / f"{os.getpid()}").touch()
    deadline = time.monotonic() + 60
    while len(list(Path(folder).iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getpid()


def die_once(item: int, folder: str) -> int:
    """Kill the worker of item 3, the first time."""
    seen = Path(folder) / "died"
    if item == 3 and not seen.exists():
        seen.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def die(item: int, _shared: None) -> int:
    """Kill the worker of item 1, every time."""
    if item == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def refuse(item: int, _shared: None) -> int:
    """Refuse item 2, as a wrong request is refused."""
    if item == 2:
        raise InvalidRequestError.of_violations((FieldViolation("layout.tp", "is 2"),), "item")
    return item


def divide(item: int, shared: int) -> float:
    """Return a quotient; none by zero."""
    return shared / item


def spend(cpu_s: float, _shared: None) -> float:
    """Compute for so much CPU time."""
    end_s = time.process_time() + cpu_s
    while time.process_time() < end_s:
        pass
    return cpu_s


def log(item: str, path: str) -> None:
    """Append the item to a file, once the file is there."""
    while not Path(path).exists():
        time.sleep(0.01)
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(f"{item}\n")


def wait_for_file(item: int, path: str) -> int:
    """Return the item once a file is there; that it waits is shown by a file next to it."""
    Path(f"{path}.waits-{item}").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return item


def print_much(item: int, _shared: None) -> int:
    """Print where answers go, which must not disturb them."""
    print("x" * 10_000)  # noqa: T201
    os.write(1, b"raw")
    return item


def find_niceness(_item: int, _shared: object) -> int:
    return os.nice(0)


def num_threads(_item: int, _shared: None) -> str:
    """Return how many threads OpenMP may use."""
    return os.environ["OMP_NUM_THREADS"]
