"""Groups of engines behind a router: when requests arrive and which engine gets them."""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from foretoken.domain.engine import EngineProfile
from foretoken.domain.units import NS_PER_MS, NS_PER_US
from foretoken.simulator.serving.record import RequestOutcome
from foretoken.simulator.serving.replica_group import NEVER_NS, ReplicaGroup, Turn
from foretoken.simulator.serving.request import SimRequest
from foretoken.simulator.serving.request_plan import NONE, RequestPlan
from foretoken.simulator.serving.routing import EngineLoad, Router


class Cluster:
    """Runs the requests of a plan through groups of engines until all are done.

    At an instant tokens leave first, then requests arrive, then engines schedule.
    """

    def __init__(
        self,
        plan: RequestPlan,
        rules: EngineProfile,
        groups: Sequence[ReplicaGroup],
        router: Router,
        max_context: int,
    ) -> None:
        self._plan = plan
        self._rules = rules
        self._groups = groups
        self._router = router
        self._max_context = max_context
        self._engines = [(group, replica) for group in groups for replica in group.replicas]
        self.requests = [
            SimRequest(index, int(plan.num_prefill_tokens[index]), int(decode_tokens))
            for index, decode_tokens in enumerate(plan.num_decode_tokens)
        ]
        self.num_done = 0
        # (when it is ready, its index)
        self._ready: list[tuple[int, int]] = []
        self._held_back: deque[int] = deque()
        self._followers: defaultdict[int, list[int]] = defaultdict(list)

    def run(self, watch: Callable[[], None]) -> None:
        """Simulate to the end; `watch` is called after every instant."""
        self._send_first()
        while (now_ns := self._next_ns()) < NEVER_NS:
            for group in self._groups:
                if group.next_ns == now_ns and group.turn_kind is Turn.COMPLETE:
                    for request in group.complete():
                        self._end(request, now_ns)
            while self._ready and self._ready[0][0] == now_ns:
                self._route(self.requests[heapq.heappop(self._ready)[1]], now_ns)
            for group in self._groups:
                if group.next_ns == now_ns and group.turn_kind is not Turn.COMPLETE:
                    for request in group.turn():
                        self._end(request, now_ns)
            watch()

    def _next_ns(self) -> int:
        ready_ns = self._ready[0][0] if self._ready else NEVER_NS
        return min(ready_ns, *(group.next_ns for group in self._groups))

    def _send_first(self) -> None:
        """Send what arrives by itself; a closed loop holds the rest back."""
        plan = self._plan
        for index, followed in enumerate(plan.follows.tolist()):
            if followed != NONE:
                self._followers[followed].append(index)
            elif plan.concurrency == 0 or len(self._ready) < plan.concurrency:
                self._send(index, 0)
            else:
                self._held_back.append(index)

    def _send(self, index: int, now_ns: int) -> None:
        """Let a client send a request now, or at its earliest; the server's frontend gets it."""
        rules, request = self._rules, self.requests[index]
        frontend_ns = (
            rules.frontend_ms * NS_PER_MS
            + rules.frontend_us_per_token * NS_PER_US * request.num_prefill_tokens
        )
        request.arrival_ns = max(now_ns, int(self._plan.arrival_ns[index]))
        request.ready_ns = request.arrival_ns + round(frontend_ns)
        heapq.heappush(self._ready, (request.ready_ns, index))

    def _route(self, request: SimRequest, now_ns: int) -> None:
        """Give a request that is ready to an engine, or refuse it."""
        if request.num_prefill_tokens + request.num_decode_tokens > self._max_context:
            request.outcome = RequestOutcome.CONTEXT_TOO_LONG
        elif not self._engines[0][1].kv.can_ever_hold(request):
            request.outcome = RequestOutcome.EXCEEDS_KV_CACHE
        if request.outcome:
            self._end(request, now_ns)
            return
        loads = [
            EngineLoad(len(replica.arrived) + len(replica.waiting), len(replica.running))
            for _, replica in self._engines
        ]
        request.engine = self._router.choose(loads)
        group, replica = self._engines[request.engine]
        replica.arrived.append(request)
        group.wake(now_ns)

    def _end(self, request: SimRequest, now_ns: int) -> None:
        """Send the requests that follow one, or the next of a closed loop."""
        self.num_done += 1
        followers = self._followers[request.index]
        for index in followers:
            self._send(index, now_ns + int(self._plan.think_ns[index]))
        if self._plan.concurrency > 0 and not followers and self._held_back:
            self._send(self._held_back.popleft(), now_ns)
