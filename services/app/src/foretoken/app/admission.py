"""How many calls of each method a server takes at once.

Every method has threads of its own: calls that hold theirs, however many, keep no other method from
being answered, health least of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import grpc

from foretoken.app.access import Access
from foretoken.app.call_guard import CallGuard, Patience, TimeLimits
from foretoken.app.config import ServerConfig
from foretoken.app.lane import Lane, LargeCalls, LargeLimits
from foretoken.app.request_metrics import RequestMetrics
from foretoken.domain.errors import (
    InvalidRequestError,
    ServerBusyError,
    find_near,
)
from foretoken.jobs.executors.local import count_cores
from foretoken.wire.errors import error_to_status
from foretoken.wire.rpc import Unary
from foretoken.wire.rpcs import TABLES

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

# By method: those of our services are in their tables, and health is asked by every client that
# balances. Each holds its thread for minutes, mostly waiting.
_BUDGETS: Mapping[str, int] = {
    "Check": 64,
    "Watch": 64,
    **{line.rpc_name: line.budget for table in TABLES for line in table.lines().values()},
}


# What says how many rows a request is about, by the full name of the method.
_WEIGHTS: Mapping[str, Callable[[Any], int]] = {
    f"/{table.service}/{line.rpc_name}": line.weigh
    for table in TABLES
    for line in table.lines().values()
    if isinstance(line, Unary) and line.weigh is not None
}
_SERVICES: Mapping[str, str] = {table.service: table.short_name() for table in TABLES}


class Admission(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Guards and admits calls.

    gRPC calls interceptors in its own thread, before the call has one: refusing takes no thread
    that a call could hold.
    """

    def __init__(
        self,
        guard: CallGuard,
        new_lane: Callable[[str, Handler], Lane],
        new_large: Callable[[str, Lane], LargeCalls | None],
        retry_after_s: float,
        count_refused: Callable[[str], None],
    ) -> None:
        """Keep how lanes are made, and what counts the refused calls of a method.

        `new_large` makes what limits a method's large calls, where it has any.
        """
        self._guard = guard
        self._new_large = new_large
        self._new_lane = new_lane
        self._retry_after_s = retry_after_s
        self._count_refused = count_refused
        # By method, and only of those that exist.
        self._admitted: dict[str, tuple[Lane, Handler, Handler]] = {}
        self._refusing = ThreadPoolExecutor(1, thread_name_prefix="refusals")

    def close(self) -> None:
        """Make no more threads; those there are end with their calls."""
        for lane, _, _ in self._admitted.values():
            lane.pool.shutdown(wait=False)
        self._refusing.shutdown(wait=False)

    def lanes(self) -> Mapping[str, Lane]:
        """Return the lanes of our own services' methods, by `SERVICE/METHOD`."""
        found = {}
        for method, (lane, _, _) in self._admitted.copy().items():
            package, _, name = method.removeprefix("/").partition("/")
            if package in _SERVICES:
                found[f"{_SERVICES[package]}/{name}"] = lane
        return found

    def num_calls(self, method: str) -> int:
        """Return how many calls of a method, by its full name, run or wait."""
        return self._admitted[method][0].num_calls if method in self._admitted else 0

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the guarded handler, or one that refuses."""
        method = handler_call_details.method
        if method not in self._admitted:
            handler = continuation(handler_call_details)
            if handler is None:
                return None
            lane = self._new_lane(method, handler)
            large = self._new_large(method, lane)
            answering = self._guard.guard(method, handler, lane.leave, large)
            guarded = _run_in(lane.pool, answering)
            self._admitted[method] = (lane, guarded, self._refusal(method, lane))
        lane, guarded, refusal = self._admitted[method]
        if lane.enter():
            return guarded
        self._count_refused(method)
        return refusal

    def _refusal(self, method: str, lane: Lane) -> Handler:
        error = ServerBusyError(
            f"{method.rpartition('/')[2]}: {lane.describe()}; try again later", self._retry_after_s
        )
        status = error_to_status(error)

        def refuse(_requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            context.abort_with_status(status)
            yield

        # On the wire a single message is a stream of one, so this refuses every kind of call.
        return _run_in(self._refusing, grpc.stream_stream_rpc_method_handler(refuse))


def _run_in(pool: Executor, handler: Handler) -> Handler:
    """Return a handler of streams whose calls run in the threads of a pool."""
    behaviour: Any = handler.stream_stream or handler.stream_unary

    def run(messages: Any, *rest: Any) -> Any:
        return behaviour(messages, *rest)

    # gRPC's own health service says so where it is to run, too.
    run.experimental_thread_pool = pool  # type: ignore[attr-defined]
    if getattr(behaviour, "experimental_non_blocking", False):
        run.experimental_non_blocking = True  # type: ignore[attr-defined]
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(
            run, response_serializer=handler.response_serializer
        )
    return grpc.stream_unary_rpc_method_handler(
        run, response_serializer=handler.response_serializer
    )


def budget_of(config: ServerConfig, name: str) -> int:
    """Return how many calls of a method run at once, by the proto's name of it."""
    return config.budgets.get(name) or _BUDGETS.get(name) or config.max_workers


def build_admission(
    config: ServerConfig, access: Access, limits: TimeLimits, metrics: RequestMetrics
) -> Admission:
    """Return the admission that a server's configuration describes.

    Raises:
        InvalidRequestError: a budget of a method that no service has.

    """
    for name in config.budgets:
        if name not in _BUDGETS:
            near = ", ".join(find_near(name, _BUDGETS))
            raise InvalidRequestError.of_field(
                f"server.budgets.{name}", f"no service has that method; near are {near}"
            )

    def new_lane(method: str, handler: Handler) -> Lane:
        name = method.rpartition("/")[2]
        budget = budget_of(config, name)
        holds_thread = handler.request_streaming or name.startswith("Watch")
        return Lane(method, budget, 0 if holds_thread else config.max_queued_calls)

    def new_large(method: str, lane: Lane) -> LargeCalls | None:
        weigh = _WEIGHTS.get(method)
        if weigh is None or not config.large_call_rows:
            return None
        limits = LargeLimits(
            min_rows=config.large_call_rows,
            # They compute: more at once than there are cores only takes more memory.
            num_at_once=count_cores(),
            max_present=max(lane.num_threads // 2, 1),
            retry_after_s=config.retry_after_s,
        )
        return LargeCalls(weigh, limits, partial(metrics.count_refused, method))

    patience = Patience(first_message_s=config.first_message_s, idle_s=config.stream_idle_s)
    guard = CallGuard(patience, limits, access.admit, metrics.count_undecodable)
    return Admission(guard, new_lane, new_large, config.retry_after_s, metrics.count_refused)
