"""Time collectives over the devices of this machine, one process per rank."""

import logging
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from foretoken.domain.estimate import OperatorCall
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.timer import TimingSummary

_log = logging.getLogger(__name__)

# No case of a sweep comes near it; a rank that is silent for so long is stuck.
_ANSWER_S_MAX = 120.0
_STOP_S_MAX = 5.0


class CollectiveTimingError(Exception):
    """A collective could not be timed; the message says why."""


class GroupLostError(CollectiveTimingError):
    """A rank died or is stuck: the group can time nothing more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """A group of local ranks: how many, on what kind of device, timed how."""

    num_ranks: int
    is_cuda: bool
    seed: int
    timer: TimerSpec

    @property
    def backend(self) -> str:
        """Name of torch's communication library."""
        return "nccl" if self.is_cuda else "gloo"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOrder:
    """What a rank is told first: which one it is, of what group, and the file they meet in."""

    rank: int
    meeting_file: str
    timeout_s: float
    group: GroupSpec


class CollectiveGroup:
    """Processes that form a process group and time calls on request.

    They meet through a file in a temporary folder, so no port is taken, and end when this process
    does, however it ends: each waits on a pipe from here.
    """

    def __init__(self, spec: GroupSpec) -> None:
        """Describe the group; `open` starts it."""
        self._spec = spec
        self._opened = ExitStack()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks."""
        return tuple(process.pid for process in self._processes)

    def open(self) -> None:
        """Start the ranks and wait until they have met.

        Raises:
            GroupLostError: they did not.

        """
        folder = self._opened.enter_context(tempfile.TemporaryDirectory(prefix="foretoken-ranks-"))
        try:
            for rank in range(self._spec.num_ranks):
                self._start_rank(rank, str(Path(folder) / "rendezvous"))
        except OSError as err:
            raise GroupLostError(f"a rank did not start: {err!r}") from err
        self._receive()

    def close(self) -> None:
        """Stop all ranks."""
        # All pipes first: ranks that wait for each other then end together.
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._processes.clear()
        self._opened.close()

    def time(self, call: OperatorCall) -> TimingSummary:
        """Time one call on all ranks; the slowest rank counts.

        Raises:
            CollectiveTimingError: the backend cannot run it.
            GroupLostError: a rank does not answer.

        """
        try:
            for connection in self._connections:
                connection.send(call)
        except OSError as err:
            raise GroupLostError(f"a rank is gone: {err!r}") from err
        return self._receive()

    def _start_rank(self, rank: int, meeting_file: str) -> None:
        here, there = Pipe()
        # A program of its own, not a fork or spawn of this one: that would run the caller's main
        # module again.
        with there:
            process = subprocess.Popen(  # noqa: S603 - our own module, no outside input
                (sys.executable, "-P", "-m", "foretoken.profiler.rank", str(there.fileno())),
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._opened.callback(_stop, process)
        self._connections.append(here)
        self._processes.append(process)
        order = RankOrder(
            rank=rank,
            meeting_file=meeting_file,
            timeout_s=_ANSWER_S_MAX / 2,
            group=self._spec,
        )
        here.send(order)

    def _receive(self) -> TimingSummary:
        answers = []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(_ANSWER_S_MAX):
                    raise GroupLostError(f"rank {rank} did not answer")
                answers.append(connection.recv())
            except (EOFError, OSError) as err:
                raise GroupLostError(f"rank {rank} died: {err!r}") from err
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        summary: TimingSummary = answers[0]
        return summary


def _stop(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(_STOP_S_MAX)
    except subprocess.TimeoutExpired:
        _log.warning("rank pid=%d does not end; killing it", process.pid)
        process.kill()
        process.wait()
