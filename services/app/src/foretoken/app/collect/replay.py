"""Send the requests of a plan when they are due, and gather what came back."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import aiohttp

from foretoken.app.collect.answer import Answer
from foretoken.app.collect.prompt import PromptMaker
from foretoken.app.collect.sender import send_request
from foretoken.app.collect.target import Target
from foretoken.domain.units import NS_PER_S
from foretoken.simulator.workload.request_plan import NONE, RequestPlan

# (number done, number in all, number under way)
Progress = Callable[[int, int, int], None]


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
        self._followers = self._find_followers()
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
        waiting = deque(self._first_requests())
        for _ in range(min(self.plan.concurrency, len(waiting))):
            self._spawn(self._work(waiting))
        await self._wait()

    async def _work(self, waiting: deque[int]) -> None:
        while waiting:
            index = waiting.popleft()
            body = self._build(index)
            due_s = float(self.plan.arrival_ns[index]) / NS_PER_S
            await self._sleep_until(due_s)
            await self._send_chain(index, body, max(due_s, self.now_s()))

    async def _send_chain(self, index: int, body: bytes, due_s: float) -> None:
        """Send a request and the turns that follow it, each after the one before."""
        while True:
            await self._send(index, body, due_s)
            following = self._followers.get(index)
            if following is None or self.answers[index].error:
                return
            index = following
            earliest_s = float(self.plan.arrival_ns[index]) / NS_PER_S
            due_s = max(self.now_s() + float(self.plan.think_ns[index]) / NS_PER_S, earliest_s)
            body = self._build(index)
            await self._sleep_until(due_s)

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
        """Return the requests that follow no other."""
        return [
            index for index in range(self.plan.num_requests) if self.plan.follows[index] == NONE
        ]

    def _find_followers(self) -> dict[int, int]:
        follows = enumerate(self.plan.follows.tolist())
        return {before: index for index, before in follows if before != NONE}

    async def _sleep_until(self, due_s: float) -> None:
        delay_s = due_s - self.now_s()
        await asyncio.sleep(max(delay_s, 0.0))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks)
