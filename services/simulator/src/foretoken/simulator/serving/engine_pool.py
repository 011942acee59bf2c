"""Replicas that are alike, on one clock: what a cluster moves requests through.

`reference_pool.py` is what is meant, in plain Python; `fast/pool.py` is compiled and gives the same
to the nanosecond.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from foretoken.simulator.serving.record import Ints, RequestOutcome, StepRecord, TokenRuns
from foretoken.simulator.serving.routing import EngineLoad

# What a pool knows of each request.
TIME_COLUMNS = ("queued_ns", "scheduled_ns", "first_token_ns", "finished_ns")
COUNT_COLUMNS = ("num_preemptions", "num_cached_tokens", "num_loaded_tokens")


class PoolRole(enum.Enum):
    """What a pool does with a request.

    `PREFILL` ends a request with its first token and keeps its blocks until they are released.
    `DECODE` takes requests whose prompt has been computed and whose first token has left.
    """

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class Ended(NamedTuple):
    """A request that a pool is done with: its index in the plan, and how it ended."""

    request: int
    outcome: RequestOutcome


class EnginePool(Protocol):
    """Engines of one kind, from 0 to `num_engines`; all times in ns of one clock.

    At an instant tokens leave first (`complete`), then the cluster routes what is ready, then
    engines schedule (`turn`). `advance` does both for a pool that nobody disturbs.
    """

    @property
    def num_engines(self) -> int:
        """Engines there are, running or not."""

    @property
    def next_ns(self) -> int:
        """When an engine next does something; NEVER_NS where all wait for requests."""

    def complete(self, now_ns: int) -> Sequence[Ended]:
        """Let the tokens that leave at this instant leave; return the requests that ended."""

    def turn(self, now_ns: int) -> Sequence[Ended]:
        """Let the engines whose turn it is schedule; return requests that will never have room."""

    def advance(self, horizon_ns: int) -> tuple[int, Sequence[Ended]]:
        """Go on by itself before the horizon, at most to the first instant at which requests end.

        Returns that instant, whose `turn` is yet to come, and the requests; or the horizon and
        none.
        """

    def quiet_until(self, horizon_ns: int) -> int:
        """Return a time, at most the horizon, before which no request ends if undisturbed."""

    def submit(self, engine: int, request: int, now_ns: int) -> None:
        """Give an engine a request, which it sees when it next turns; an idle one turns now.

        The request begins anew, whatever it did here before. In a pool of role DECODE `reserve` has
        found room for it, and it runs as soon as there is a seat.
        """

    def reserve(self, engine: int, request: int) -> bool:
        """Take the KV blocks of a prompt that will be sent here, and one token more, if free.

        Source: vLLM's NIXL connector, which allocates before it pulls.
        """

    def scheduled_ns(self, request: int) -> int:
        """Return when a request was first in a step since it was last submitted."""

    def release(self, engine: int, request: int, now_ns: int) -> None:
        """Free the blocks of a request that does not run; its engine may go on.

        They were kept after its prefill and have been sent, or reserved for one that will not come.
        """

    def withdraw(self, engine: int, now_ns: int) -> Sequence[int]:
        """Take everything off an engine that fails, and off those in lock step with it.

        Returns the requests that had not ended, ascending. Finished steps stay written down, a
        batch in flight is lost. The engine is empty and idle after, its cache without content.
        Requests it had reserved room for, or kept the blocks of, are the caller's to know.
        """

    def load_of(self, engine: int) -> EngineLoad:
        """Return what an engine has to do now."""

    def can_ever_hold(self, request: int) -> bool:
        """Whether an empty engine has KV blocks for a request."""

    def steps(self) -> Sequence[StepRecord]:
        """Return the steps of each engine so far."""

    def tokens(self) -> TokenRuns:
        """Return the output tokens so far, by request and in order; `engine` is this pool's.

        Of a request that began anew only those since.
        """

    def columns(self) -> Mapping[str, Ints]:
        """Return `TIME_COLUMNS` and `COUNT_COLUMNS` by name, one entry per request of the plan.

        Times are those since the request was last submitted, -1 where not reached; counts are of
        all its time here, 0 where it was never here.
        """
