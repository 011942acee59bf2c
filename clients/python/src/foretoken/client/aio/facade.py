"""Foretoken in one object for asyncio: the calls of `Foretoken`, each to be awaited."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial, update_wrapper
from threading import Lock
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from foretoken.client.facade import Foretoken
from foretoken.client.job_wait import OnProgress
from foretoken.domain.errors import ForetokenError
from foretoken.domain.job import Job
from foretoken.domain.ports import JobsPort

P = ParamSpec("P")
R = TypeVar("R")

# Calls under way at once; others wait for one of them.
_MAX_CALLS = 64


class _Awaited(Generic[P, R]):
    """A method of `Foretoken` as one to be awaited, which runs in a thread.

    `service` is the one whose job the call waits for (empty: the call waits for none). Leaving such
    a call cancels the job, and `on_progress` is called in the event loop.
    """

    def __init__(self, call: Callable[Concatenate[Foretoken, P], R], service: str = "") -> None:
        self._call: Callable[..., R] = call
        self._service = service

    def __get__(
        self, owner: "AsyncForetoken", cls: type | None = None
    ) -> Callable[P, Coroutine[Any, Any, R]]:
        bound = partial(self._call_job if self._service else self._call_plainly, owner)
        return update_wrapper(bound, self._call)

    async def _call_plainly(self, owner: "AsyncForetoken", *args: Any, **keys: Any) -> R:
        return await owner.run(partial(self._call, owner.foretoken, *args, **keys))

    async def _call_job(
        self,
        owner: "AsyncForetoken",
        *args: Any,
        on_progress: OnProgress | None = None,
        **keys: Any,
    ) -> R:
        # The one further argument that such a call has, where it is given by its place.
        request, further = args[:1], args[1:]
        watched = _WatchedJob(
            lambda: getattr(owner.foretoken, self._service), *further, on_progress
        )
        call = partial(self._call, owner.foretoken, *request, on_progress=watched, **keys)
        try:
            return await owner.run(call)
        except asyncio.CancelledError:
            await asyncio.shield(owner.run(watched.leave))
            raise


class _WatchedJob:
    """The job of a call: reported to the event loop, and cancelled once nobody waits for it."""

    def __init__(self, find_jobs: Callable[[], JobsPort], *on_progress: OnProgress | None) -> None:
        self._find_jobs = find_jobs
        self._listeners = [listener for listener in on_progress if listener is not None]
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._job_id = ""
        self._is_left = False

    def __call__(self, job: Job) -> None:
        """Take note of a state, in the thread of the call."""
        with self._lock:
            is_first, self._job_id = not self._job_id, job.job_id
            is_left = self._is_left
        if is_left and is_first:
            self._cancel(job.job_id)
        elif not is_left:
            for listener in self._listeners:
                self._loop.call_soon_threadsafe(listener, job)

    def leave(self) -> None:
        """Cancel the job now, or when it is there."""
        with self._lock:
            self._is_left, job_id = True, self._job_id
        if job_id:
            self._cancel(job_id)

    def _cancel(self, job_id: str) -> None:
        # A service that is gone cannot be notified; nobody waits for it any more.
        with suppress(ForetokenError):
            self._find_jobs().cancel_job(job_id)


class AsyncForetoken:
    """What `Foretoken` does, without keeping an event loop from others: each call runs in a thread.

    A call that waits for a job takes `on_progress`, called in the event loop; cancelling its task
    cancels the job. `foretoken` is the object whose methods these are.
    """

    def __init__(self, foretoken: Foretoken) -> None:
        """Keep the object, which is closed with this."""
        self.foretoken = foretoken
        self._threads = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="foretoken-call")

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the services or connections."""
        await self.close()

    async def close(self) -> None:
        """Close the services or connections, once no call is under way."""
        await self.run(self.foretoken.close)
        self._threads.shutdown(wait=False)

    async def run(self, call: Callable[[], R]) -> R:
        """Return what a call returns, which runs in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    profile = _Awaited(Foretoken.profile, "profiler")
    profile_graph = _Awaited(Foretoken.profile_graph, "profiler")
    measure_closure = _Awaited(Foretoken.measure_closure, "profiler")
    import_measurements = _Awaited(Foretoken.import_measurements)
    check = _Awaited(Foretoken.check, "catalog")
    sql = _Awaited(Foretoken.sql)
    coverage = _Awaited(Foretoken.coverage)
    train = _Awaited(Foretoken.train, "predictor")
    predict = _Awaited(Foretoken.predict)
    explain = _Awaited(Foretoken.explain)
    tabulate = _Awaited(Foretoken.tabulate)
    plan = _Awaited(Foretoken.plan)
    calibrate = _Awaited(Foretoken.calibrate)
    simulate_serving = _Awaited(Foretoken.simulate_serving, "simulator")
    read_serving_table = _Awaited(Foretoken.read_serving_table)
    simulate_training = _Awaited(Foretoken.simulate_training, "simulator")
    read_training_table = _Awaited(Foretoken.read_training_table)
    find_capacity = _Awaited(Foretoken.find_capacity, "simulator")
    search_serving = _Awaited(Foretoken.search_serving, "simulator")
    plan_training_memory = _Awaited(Foretoken.plan_training_memory)
    plan_training_run = _Awaited(Foretoken.plan_training_run)
    search_training = _Awaited(Foretoken.search_training, "simulator")
    list_results = _Awaited(Foretoken.list_results)
    get_result = _Awaited(Foretoken.get_result)
