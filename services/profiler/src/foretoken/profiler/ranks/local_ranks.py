"""The ranks of this node: processes that time calls on request, and end with this one."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.profiler.ranks.group_spec import (
    CollectiveTimingError,
    GroupLostError,
    GroupSpec,
    OtherRankError,
    RankOrder,
)
from foretoken.profiler.ranks.rendezvous import choose_interface
from foretoken.profiler.timing.timer import TimingSummary

_log = logging.getLogger(__name__)

# Longest wait of one rank for another in a single operation.
_OPERATION_S_MAX = 120.0
# Idle ranks end at once; one that waits for another in an operation does not look at its pipe.
_STOP_S_MAX = 5.0

_PROGRAM = (sys.executable, "-P", "-m", "foretoken.profiler.ranks.rank")

# What a rank answers: nothing where it had no part.
Answer = TimingSummary | CollectiveTimingError | None


class LocalRanks:
    """Processes of this node, each with a pipe to here; they end when the pipe closes."""

    def __init__(self, spec: GroupSpec) -> None:
        """Describe the ranks; `open` starts them."""
        self._spec = spec
        self._opened = ExitStack()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: dict[int, Answer] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks."""
        return tuple(process.pid for process in self._processes)

    def open(self, generation: int) -> None:
        """Start the ranks; they answer once all ranks of all nodes have met.

        Raises:
            GroupLostError: one did not start.

        """
        rendezvous = self._spec.rendezvous
        place = rendezvous.endpoint
        if rendezvous.num_nodes == 1:
            # They meet through a file, so no port is taken.
            folder = tempfile.TemporaryDirectory(prefix="foretoken-ranks-")
            place = str(Path(self._opened.enter_context(folder)) / "rendezvous")
        interface = choose_interface(rendezvous)
        self._answers.clear()
        try:
            for local_rank in range(self._spec.num_ranks):
                self._start(
                    RankOrder(
                        node=rendezvous.node_rank,
                        local_rank=local_rank,
                        place=place,
                        prefix=f"{rendezvous.prefix}/ranks/{generation}",
                        interface=interface,
                        timeout_s=_OPERATION_S_MAX,
                        group=self._spec,
                    )
                )
        except OSError as err:
            raise GroupLostError(f"a rank did not start: {err!r}") from err

    def close(self) -> None:
        """Stop all ranks; those that are stuck are killed."""
        # All pipes first: ranks that wait for each other then end together.
        for connection in self._connections:
            connection.close()
        deadline_s = time.monotonic() + _STOP_S_MAX
        for process in self._processes:
            _stop(process, max(deadline_s - time.monotonic(), 0.0))
        self._connections.clear()
        self._processes.clear()
        self._opened.close()

    def send(self, call: OperatorCall) -> None:
        """Ask all ranks to time a call.

        Raises:
            GroupLostError: one is gone.

        """
        self._answers.clear()
        try:
            for connection in self._connections:
                connection.send(call)
        except OSError as err:
            raise GroupLostError(f"a rank is gone: {err!r}") from err

    def poll(self, wait_s: float) -> bool:
        """Wait a while for answers; return whether all are there.

        Raises:
            GroupLostError: a rank died.

        """
        waiting = {
            connection: local_rank
            for local_rank, connection in enumerate(self._connections)
            if local_rank not in self._answers
        }
        end_s = time.monotonic() + wait_s
        while waiting:
            ready = wait(waiting, max(end_s - time.monotonic(), 0.0))
            if not ready:
                return False
            for connection in ready:
                if isinstance(connection, Connection):
                    self._receive(connection, waiting.pop(connection))
        return True

    def outcome(self) -> TimingSummary | None:
        """Return what the ranks have agreed on, None where none had a part.

        Raises:
            CollectiveTimingError: none of them could time the call.
            GroupLostError: some could not, so that they are out of step.

        """
        return merge_answers(list(self._answers.values()))

    def _receive(self, connection: Connection, local_rank: int) -> None:
        try:
            self._answers[local_rank] = connection.recv()
        except (EOFError, OSError) as err:
            process = self._processes[local_rank]
            ending = f"exit status {process.poll()}" if process.poll() is not None else repr(err)
            rank = self._spec.rendezvous.node_rank * self._spec.num_ranks + local_rank
            raise GroupLostError(f"rank {rank} died ({ending})") from err

    def _start(self, order: RankOrder) -> None:
        here, there = Pipe()
        # A program of its own, not a fork or spawn of this one: that would run the caller's main
        # module again.
        with there:
            process = subprocess.Popen(  # noqa: S603 - our own module, no outside input
                (*_PROGRAM, str(there.fileno()), str(os.getpid())),
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._connections.append(here)
        self._processes.append(process)
        here.send(order)


def merge_answers(answers: list[Answer]) -> TimingSummary | None:
    """Return the time that ranks or nodes have agreed on, None where none had a part.

    Raises:
        CollectiveTimingError: none of them could time the call.
        GroupLostError: one is lost, or some could not, so that they are out of step.

    """
    errors = [answer for answer in answers if isinstance(answer, CollectiveTimingError)]
    summaries = [answer for answer in answers if isinstance(answer, TimingSummary)]
    for error in errors:
        if isinstance(error, GroupLostError):
            raise error
    # The rank that has a reason of its own, before those that only followed it.
    errors.sort(key=lambda error: isinstance(error, OtherRankError))
    if errors and summaries:
        raise GroupLostError(f"some ranks failed: {errors[0]}")
    if errors:
        raise errors[0]
    return summaries[0] if summaries else None


def _stop(process: "subprocess.Popen[bytes]", wait_s: float) -> None:
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        _log.warning("rank pid=%d does not end; killing it", process.pid)
        process.kill()
        process.wait()
