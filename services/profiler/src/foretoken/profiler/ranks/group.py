"""Time collectives over the devices of this node, and of others that meet it."""

import logging
import time
from typing import Any

from foretoken.domain import schema
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.profiler.ranks.group_spec import CollectiveTimingError, GroupLostError, GroupSpec
from foretoken.profiler.ranks.local_ranks import Answer, LocalRanks, merge_answers
from foretoken.profiler.ranks.rendezvous_store import (
    NodeOrder,
    Notify,
    OrderKind,
    Rendezvous,
    answer_from_content,
    answer_key,
    greeting_key,
    order_key,
)
from foretoken.profiler.timing.timer import TimingSummary

__all__ = ["CollectiveGroup", "CollectiveTimingError", "GroupLostError", "GroupSpec"]

_log = logging.getLogger(__name__)

# No case of a sweep comes near it; ranks that are silent for so long are stuck.
_ANSWER_S_MAX = 600.0
# Starting a rank imports torch and, on GPUs, initialises CUDA and NCCL.
_OPEN_S_MAX = 180.0
_CLOSE_S_MAX = 5.0
_POLL_S = 0.2
_OTHERS_POLL_S = 0.02


class CollectiveGroup:
    """Ranks on this node, and on the others of a rendezvous, that time calls on request.

    Each rank is a process with one device. They end when this process does, however it ends.
    """

    def __init__(self, spec: GroupSpec) -> None:
        """Describe the group; `open` starts it."""
        self._spec = spec
        self._ranks = LocalRanks(spec)
        self._rendezvous: Rendezvous | None = None
        self._num_orders = 0
        self._num_openings = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks of this node."""
        return self._ranks.pids

    def open(self, notify: Notify = _log.info) -> None:
        """Start the ranks and wait until they have met; opening again starts new ones.

        Raises:
            GroupLostError: they did not.

        """
        self._ranks.close()
        if self._spec.rendezvous.num_nodes > 1 and self._rendezvous is None:
            self._meet(notify)
        self._num_openings += 1
        self._tell(OrderKind.OPEN, group=self._spec, generation=self._num_openings)
        self._ranks.open(self._num_openings)
        self._outcome(_OPEN_S_MAX)

    def close(self) -> None:
        """Stop all ranks, and let the other nodes go."""
        self._ranks.close()
        if self._rendezvous is None:
            return
        try:
            self._tell(OrderKind.CLOSE)
            # The store ends with this process: wait until all have read it.
            for node in self._others():
                self._rendezvous.hear(self._answer_key(node), node, wait_s=_CLOSE_S_MAX)
        except GroupLostError as err:
            _log.warning("%s", err)
        finally:
            self._rendezvous.close()
            self._rendezvous = None

    def time(self, call: OperatorCall) -> TimingSummary:
        """Time one call in its group of ranks; the slowest rank counts.

        Raises:
            CollectiveTimingError: it cannot be timed.
            GroupLostError: a rank does not answer.

        """
        self._tell(OrderKind.TIME, call=call)
        self._ranks.send(call)
        outcome = self._outcome(_ANSWER_S_MAX)
        if outcome is None:
            raise GroupLostError("no rank took part")
        return outcome

    def _meet(self, notify: Notify) -> None:
        spec = self._spec.rendezvous
        self._rendezvous = Rendezvous(spec)
        self._rendezvous.open(notify)
        for node in self._others():
            greeting = self._rendezvous.hear(
                greeting_key(node), node, wait_s=spec.wait_s, notify=notify
            )
            self._check_greeting(node, greeting)

    def _check_greeting(self, node: int, greeting: dict[str, Any]) -> None:
        has_device = greeting["is_cuda"] == self._spec.is_cuda
        if not has_device or greeting["num_ranks"] < self._spec.num_ranks:
            raise GroupLostError(
                f"node {node} ({greeting['host']}) has {greeting['num_ranks']} devices"
                f"{'' if has_device else ' of another kind'}; this one times groups of"
                f" {self._spec.num_ranks} a node"
            )

    def _others(self) -> range:
        return range(1, self._spec.rendezvous.num_nodes)

    def _tell(self, kind: OrderKind, **content: Any) -> None:
        if self._rendezvous is None:
            return
        self._num_orders += 1
        order = NodeOrder(kind=kind, **content)
        self._rendezvous.say(order_key(self._num_orders), schema.encode(order))

    def _answer_key(self, node: int) -> str:
        return answer_key(self._num_orders, node)

    def _outcome(self, wait_s: float) -> TimingSummary | None:
        deadline_s = time.monotonic() + wait_s
        answers: list[Answer] = []
        pending = list(self._others()) if self._rendezvous is not None else []
        while not (have_answered := self._ranks.poll(_POLL_S)) or pending:
            for node in [node for node in pending if self._has_answered(node)]:
                pending.remove(node)
                answers.append(self._answer_of(node))
                merge_answers([a for a in answers if isinstance(a, GroupLostError)])
            if time.monotonic() >= deadline_s:
                silent = f"node {pending[0]}" if pending else "a rank of this node"
                raise GroupLostError(f"{silent} did not answer within {wait_s:.0f} s")
            if have_answered and pending:
                # The ranks here are through, so polling them no longer waits.
                time.sleep(_OTHERS_POLL_S)
        try:
            answers.append(self._ranks.outcome())
        except CollectiveTimingError as err:
            answers.append(err)
        return merge_answers(answers)

    def _has_answered(self, node: int) -> bool:
        if self._rendezvous is None:
            return False
        if self._rendezvous.has(self._answer_key(node)):
            return True
        self._rendezvous.check_alive(node)
        return False

    def _answer_of(self, node: int) -> Answer:
        if self._rendezvous is None:
            return None
        content = self._rendezvous.hear(self._answer_key(node), node, wait_s=_CLOSE_S_MAX)
        return answer_from_content(content)
