"""A node that is not the first: it runs ranks as node 0 says, and records nothing."""

import dataclasses
import logging
import socket

from foretoken.domain import schema
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.ranks.group_spec import CollectiveTimingError, GroupLostError, GroupSpec
from foretoken.profiler.ranks.local_ranks import Answer, LocalRanks
from foretoken.profiler.ranks.rendezvous import RendezvousSpec
from foretoken.profiler.ranks.rendezvous_store import (
    NodeOrder,
    OrderKind,
    Rendezvous,
    answer_key,
    answer_to_content,
    greeting_key,
    order_key,
)

_log = logging.getLogger(__name__)

_LEADER = 0
_POLL_S = 1.0
# Node 0 may compute for long before it comes to collectives; that it is alive is asked otherwise.
_ORDER_S_MAX = 86_400.0


def serve_node(
    spec: RendezvousSpec, *, num_ranks: int, is_cuda: bool, progress: JobProgress
) -> int:
    """Run ranks as node 0 requires until it lets this node go; return how many calls were timed.

    `num_ranks` is how many there can be here. A process that torchrun started in addition to
    another one of this node has nothing to do.

    Raises:
        ServiceUnavailableError: node 0 did not come, or is gone.
        CancelledJobError: cancelled.

    """
    if spec.local_rank > 0:
        return 0
    with Rendezvous(spec) as rendezvous:
        try:
            rendezvous.open(lambda message: progress.update(0.0, message))
            greeting = {"num_ranks": num_ranks, "is_cuda": is_cuda, "host": socket.gethostname()}
            rendezvous.say(greeting_key(spec.node_rank), greeting)
            node = _Node(spec, rendezvous, progress)
            try:
                return node.serve()
            finally:
                node.close()
        except GroupLostError as err:
            raise ServiceUnavailableError(str(err)) from err


class _Node:
    """Carries out the orders of node 0."""

    def __init__(self, spec: RendezvousSpec, rendezvous: Rendezvous, progress: JobProgress) -> None:
        self._spec = spec
        self._rendezvous = rendezvous
        self._progress = progress
        self._ranks: LocalRanks | None = None
        self._num_timed = 0

    def serve(self) -> int:
        """Carry out orders until ordered to leave; return how many calls were timed."""
        number = 0
        while True:
            number += 1
            content = self._rendezvous.hear(
                order_key(number), _LEADER, wait_s=_ORDER_S_MAX, notify=self._tell
            )
            order = schema.decode(NodeOrder, content, "order")
            answer = self._carry_out(order, number)
            if order.kind is OrderKind.CLOSE:
                # Node 0 ends its store as soon as it has the answer.
                self._rendezvous.stop_beating()
            key = answer_key(number, self._spec.node_rank)
            self._rendezvous.say(key, answer_to_content(answer))
            if order.kind is OrderKind.CLOSE:
                return self._num_timed

    def close(self) -> None:
        """Stop the ranks."""
        if self._ranks is not None:
            self._ranks.close()

    def _tell(self, message: str) -> None:
        timed = f", {self._num_timed} calls timed" if self._num_timed else ""
        self._progress.update(0.0, f"{message}{timed}")

    def _carry_out(self, order: NodeOrder, number: int) -> Answer:
        try:
            if order.kind is OrderKind.OPEN and order.group is not None:
                self._open(order.group, order.generation)
                return self._outcome(number)
            if order.kind is OrderKind.TIME and order.call is not None:
                if self._ranks is None:
                    raise GroupLostError("no ranks were started")
                self._ranks.send(order.call)
                self._num_timed += 1
                return self._outcome(number)
        except CollectiveTimingError as err:
            return err
        return None

    def _open(self, group: GroupSpec, generation: int) -> None:
        self.close()
        self._ranks = LocalRanks(dataclasses.replace(group, rendezvous=self._own(group)))
        self._ranks.open(generation)

    def _own(self, group: GroupSpec) -> RendezvousSpec:
        """Return this node's part, with the keys of node 0."""
        return dataclasses.replace(self._spec, prefix=group.rendezvous.prefix)

    def _outcome(self, number: int) -> Answer:
        if self._ranks is None:
            return None
        while not self._ranks.poll(_POLL_S):
            self._rendezvous.check_alive(_LEADER)
            if self._rendezvous.has(order_key(number + 1)):
                raise GroupLostError("node 0 waits no longer")
            self._progress.update(0.0, f"timing, {self._num_timed} calls so far")
        return self._ranks.outcome()
