"""The process that answers SQL ends with what ends the watch of its memory, and says which."""

import subprocess
import sys

import pytest

from foretoken.catalog.sql.child import EXIT_MEMORY, EXIT_UNWATCHED

_PROGRAM = """
import sys, threading
from foretoken.catalog.sql.child import watch_memory

def fail(_):
    raise OSError("the clock is gone")

watch_memory(int(sys.argv[1]), fail if sys.argv[2] == "fails" else threading.Event().wait)
"""


@pytest.mark.parametrize(
    ("limit_bytes", "clock", "status", "said"),
    [
        (2**20, "works", EXIT_MEMORY, ""),
        (2**40, "fails", EXIT_UNWATCHED, "OSError: the clock is gone\n"),
    ],
)
def test_too_much_memory_and_a_watch_that_fails_are_two_ends(
    limit_bytes: int, clock: str, status: int, said: str
) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(limit_bytes), clock]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert status == ended.returncode
    assert ended.stderr.endswith(said)
    assert bool(said) == bool(ended.stderr)
