"""Send the requests of a plan when they are due, with prompts made up, and gather the answers."""

import asyncio
import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import aiohttp
import numpy as np
from numpy.typing import NDArray

from foretoken.app.collect.sender import Answer, send_request
from foretoken.app.collect.target import Target
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.workload.request_plan import NONE, RequestPlan, find_sessions, find_waits

# Ordinary tokens of every vocabulary in use: the smallest (Llama 2's) has 32,000, and tokens with a
# meaning of their own come first or last.
_FIRST_TOKEN = 1_000
_NUM_TOKENS = 30_000
# English words that are one token with a space before them in byte-pair vocabularies; a server that
# counts differently says so, and its count is what is recorded.
_TEXT = (
    "the of and to in that is was he for it with as his on be at by had not are but from or have an"
    " they which one you were her all she there would their we him been has when who will more no"
    " if out so said what up its about into than them can only other new some could time these two"
    " may then do first any my now such like our over man me even most made after also did many"
)
_WORDS = tuple(_TEXT.split())
# What a name stands for, so that a hash and a stream of equal number differ.
_OF_HASH, _OF_PREFIX, _OF_STREAM = 1, 2, 3
_Unsigned = NDArray[np.uint64]
# (number done, number in all, number under way)
Progress = Callable[[int, int, int], None]


class PromptMaker:
    """Makes the prompts of a plan; equal parts of its content become equal tokens.

    Where a request continues another's session, the tokens in place of the answer before are made
    up too, as the server's own answers are not known beforehand.
    """

    def __init__(self, plan: RequestPlan, seed: int = 0) -> None:
        self._plan = plan
        self._seed = seed

    def make_token_ids(self, request: int) -> list[int]:
        """Return the prompt of a request as token ids."""
        mixed = self._mix(request) % np.uint64(_NUM_TOKENS)
        return [int(token) + _FIRST_TOKEN for token in mixed]

    def name_blocks(self, block_tokens: int) -> Sequence[tuple[int, ...]]:
        """Return names of the whole blocks of each prompt: small numbers, equal for equal tokens.

        None of any request where no two share content.
        """
        plan = self._plan
        shares = len(plan.hashes) or (plan.prefix_tokens > 0).any()
        if not shares and len(np.unique(plan.stream)) == plan.num_requests:
            return [()] * plan.num_requests
        numbers: dict[bytes, int] = {}
        named = []
        for request in range(plan.num_requests):
            mixed = self._mix(request)
            ends = range(block_tokens, len(mixed) + 1, block_tokens)
            blocks = (mixed[end - block_tokens : end].tobytes() for end in ends)
            named.append(tuple(numbers.setdefault(block, len(numbers)) for block in blocks))
        return named

    def make_words(self, request: int) -> str:
        """Return the prompt of a request as words, about one token each."""
        places = self._mix(request) % np.uint64(len(_WORDS))
        return " ".join(_WORDS[int(place)] for place in places)

    def make(self, request: int, *, as_token_ids: bool) -> Sequence[int] | str:
        """Return the prompt of a request."""
        return self.make_token_ids(request) if as_token_ids else self.make_words(request)

    def _mix(self, request: int) -> _Unsigned:
        """Return a pseudo-random number for each token, equal where names and places are."""
        plan = self._plan
        length = int(plan.num_prefill_tokens[request])
        place = np.arange(length, dtype=np.uint64)
        name = np.full(length, int(plan.stream[request]), dtype=np.uint64)
        kind = np.full(length, _OF_STREAM, dtype=np.uint64)
        prefix = int(plan.prefix_stream[request])
        if prefix != NONE:
            reach = min(int(plan.prefix_tokens[request]), length)
            name[:reach], kind[:reach] = prefix, _OF_PREFIX
        start, end = (int(plan.hash_offsets[request + index]) for index in (0, 1))
        if end > start:
            size = plan.hash_block_tokens
            named = np.repeat(plan.hashes[start:end].astype(np.uint64), size)[:length]
            name[: len(named)], kind[: len(named)] = named, _OF_HASH
        seed = np.uint64(self._seed % 2**64)
        return _scramble(place + _scramble(name + _scramble(kind + seed)))


def _scramble(values: _Unsigned) -> _Unsigned:
    """Return numbers that look random, the same for the same values.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014 (SplitMix64).
    """
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


@dataclass(kw_only=True)
class Replay:
    """Replays a plan; `answers` has those of the requests that were sent, by their place in it.

    Requests of an open loop are sent at their times, whatever the server does, but never more than
    `max_in_flight` (0: any number) at once. In a closed loop the next one is sent when one is done.
    """

    target: Target
    plan: RequestPlan
    prompts: PromptMaker
    client: aiohttp.ClientSession
    max_in_flight: int = 0
    on_progress: Progress | None = None
    answers: dict[int, Answer] = field(default_factory=dict)

    async def run(self) -> bool:
        """Send everything; return whether it was cancelled before the end."""
        self._start_s = time.perf_counter()
        plan = self.plan
        waits = find_waits(plan.follows, plan.joins)
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        for later, earlier in zip(waits.after.tolist(), waits.before.tolist(), strict=True):
            self._followers[earlier].append(later)
        self._num_awaited = np.bincount(waits.after, minlength=plan.num_requests).tolist()
        self._num_done = 0
        self._slots = asyncio.Semaphore(self.max_in_flight or self.plan.num_requests)
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            await (self._close_loop() if self.plan.concurrency else self._keep_times())
        except asyncio.CancelledError:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            return True
        return False

    def now_s(self) -> float:
        """Return the time since the run began."""
        return time.perf_counter() - self._start_s

    async def _keep_times(self) -> None:
        for index in self._first_requests():
            body = self._build(index)
            due_s = float(self.plan.arrival_ns[index]) / NS_PER_S
            await self._sleep_until(due_s)
            self._spawn(self._send_chain(index, body, due_s))
        await self._wait()

    async def _close_loop(self) -> None:
        session = find_sessions(self.plan.follows, self.plan.joins)
        waiting: dict[int, list[int]] = {}
        for index in self._first_requests():
            waiting.setdefault(int(session[index]), []).append(index)
        sessions = deque(waiting.values())
        for _ in range(min(self.plan.concurrency, len(sessions))):
            self._spawn(self._work(sessions))
        await self._wait()

    async def _work(self, sessions: deque[list[int]]) -> None:
        while sessions:
            firsts = sessions.popleft()
            begin_s = max(float(self.plan.arrival_ns[firsts[0]]) / NS_PER_S, self.now_s())
            await asyncio.gather(*(self._spawn(self._begin(index, begin_s)) for index in firsts))

    async def _begin(self, index: int, now_s: float) -> None:
        """Send a request when its user has thought, and what waits for it."""
        earliest_s = float(self.plan.arrival_ns[index]) / NS_PER_S
        due_s = max(now_s + float(self.plan.think_ns[index]) / NS_PER_S, earliest_s)
        body = self._build(index)
        await self._sleep_until(due_s)
        await self._send_chain(index, body, due_s)

    async def _send_chain(self, index: int, body: bytes, due_s: float) -> None:
        """Send a request, then what waited for it last; nothing that waits for one that failed."""
        await self._send(index, body, due_s)
        if self.answers[index].error:
            return
        ready = []
        for follower in self._followers[index]:
            self._num_awaited[follower] -= 1
            if not self._num_awaited[follower]:
                ready.append(self._spawn(self._begin(follower, self.now_s())))
        await asyncio.gather(*ready)

    async def _send(self, index: int, body: bytes, due_s: float) -> None:
        async with self._slots:
            answer = Answer(
                planned_s=due_s,
                sent_s=self.now_s(),
                num_prefill_tokens=int(self.plan.num_prefill_tokens[index]),
                num_decode_tokens=int(self.plan.num_decode_tokens[index]),
            )
            self.answers[index] = answer
            await send_request(self.client, self.target, body, answer, self.now_s)
        self._num_done += 1
        if self.on_progress is not None:
            self.on_progress(self._num_done, self.plan.num_requests, len(self._tasks))

    def _build(self, index: int) -> bytes:
        prompt = self.prompts.make(index, as_token_ids=self.target.sends_token_ids)
        body = self.target.build_body(prompt, int(self.plan.num_decode_tokens[index]))
        return json.dumps(body, separators=(",", ":")).encode()

    def _first_requests(self) -> list[int]:
        """Return the requests that wait for no other."""
        return [index for index, count in enumerate(self._num_awaited) if not count]

    async def _sleep_until(self, due_s: float) -> None:
        delay_s = due_s - self.now_s()
        await asyncio.sleep(max(delay_s, 0.0))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wait(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)
