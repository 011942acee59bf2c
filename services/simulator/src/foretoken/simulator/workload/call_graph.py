"""From recorded calls of an agent to requests that wait for each other.

A record says when calls began and ended, not which of them needed which. A call is taken to wait
for the last ones that were complete when it began: of those, for all that no other of them came
after. So calls that overlapped stay side by side, and what came after several waits for all.
Source: inference-perf's replay, which waits for the nearest earlier calls that do not overlap, and
leaves out edges that others imply.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.domain.requests.workload import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One recorded call to a model; times in s from the begin of its agent's session."""

    start_s: float
    end_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    block_hashes: tuple[int, ...] = ()
    model: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """An agent that another one sent out: its own calls, and how long the other waited for it."""

    start_s: float
    end_s: float
    steps: Sequence["Call | Branch"]


Step = Call | Branch


@dataclass(slots=True)
class _Wait:
    """A call and the places of those that it waits for."""

    call: Call
    after: tuple[int, ...]


@dataclass(slots=True)
class CallGraph:
    """Turns steps of sessions into requests, whose places count on from session to session.

    A call continues the conversation of an earlier one of the same model whose whole prompt its own
    begins with; without hashes that of the latest. `hash_block_tokens` is what a hash stands for.
    """

    hash_block_tokens: int
    requests: list[Request] = field(default_factory=list)
    _num_conversations: int = 0

    def add_session(self, steps: Sequence[Step], begin_s: float) -> None:
        """Add the requests of one agent's session that begins at a time."""
        waits: list[_Wait] = []
        _wait_for_earlier(steps, (), waits)
        first_place = len(self.requests)
        order = sorted(range(len(waits)), key=lambda index: (waits[index].call.start_s, index))
        place_of = {index: first_place + place for place, index in enumerate(order)}
        tails: list[tuple[Call, int]] = []
        for index in order:
            call, after = waits[index].call, waits[index].after
            ends_s = [waits[before].call.end_s for before in after]
            self.requests.append(
                Request(
                    arrival_s=begin_s if after else begin_s + call.start_s,
                    num_prefill_tokens=call.num_prefill_tokens,
                    num_decode_tokens=call.num_decode_tokens,
                    block_hashes=call.block_hashes,
                    session=self._find_conversation(call, tails),
                    think_s=max(call.start_s - max(ends_s), 0.0) if after else 0.0,
                    after=tuple(sorted(place_of[before] for before in after)),
                )
            )

    def _find_conversation(self, call: Call, tails: list[tuple[Call, int]]) -> int:
        """Return the conversation that a call continues, or a new one; `tails` has their ends."""
        for place in sorted(range(len(tails)), key=lambda each: -tails[each][0].end_s):
            tail, conversation = tails[place]
            if self._continues(call, tail):
                tails[place] = (call, conversation)
                return conversation
        self._num_conversations += 1
        tails.append((call, self._num_conversations))
        return self._num_conversations

    def _continues(self, call: Call, tail: Call) -> bool:
        if call.model != tail.model or tail.end_s > call.start_s:
            return False
        if call.num_prefill_tokens < tail.num_prefill_tokens:
            return False
        num_whole = tail.num_prefill_tokens // self.hash_block_tokens
        whole = tail.block_hashes[:num_whole]
        own = call.block_hashes[: len(whole)]
        # Most differ at the end, if at all.
        return own[-1:] == whole[-1:] and own == whole


def _wait_for_earlier(
    steps: Sequence[Step], before: tuple[int, ...], waits: list[_Wait]
) -> tuple[int, ...]:
    """Append the calls of steps that begin after some others; return those that end them."""
    ends: list[tuple[int, ...]] = [()] * len(steps)
    is_last = [True] * len(steps)
    for index, earlier in order_spans([(step.start_s, step.end_s) for step in steps]):
        for each in earlier:
            is_last[each] = False
        awaited = tuple(place for each in earlier for place in ends[each]) or before
        step = steps[index]
        if isinstance(step, Branch):
            ends[index] = _wait_for_earlier(step.steps, awaited, waits)
        else:
            ends[index] = (len(waits),)
            waits.append(_Wait(step, awaited))
    return tuple(place for index, ended in enumerate(ends) if is_last[index] for place in ended)


def order_spans(spans: Sequence[tuple[float, float]]) -> list[tuple[int, list[int]]]:
    """Return spans of time by their begin, each with the last that had ended when it began.

    Of two that ended before it, one that ended before the other began is left out.
    """
    ordered = []
    running: list[tuple[float, tuple[float, int]]] = []
    # Ended and not known to have ended before another of them began: (begin, place) by end.
    ended: list[tuple[float, tuple[float, int]]] = []
    for index in sorted(range(len(spans)), key=lambda each: (spans[each][0], each)):
        start_s, end_s = spans[index]
        while running and running[0][0] <= start_s:
            ended.append(heapq.heappop(running))
        latest = max((begun for _, begun in ended), default=(0.0, 0))
        ended = [each for each in ended if each[1] == latest or each[0] > latest[0]]
        ordered.append((index, [place for _, (_, place) in ended]))
        heapq.heappush(running, (max(end_s, start_s), (start_s, index)))
    return ordered
