"""What a pool of engines does with requests, and what it tells of them."""

import enum
from typing import NamedTuple

from foretoken.simulator.serving.record import RequestOutcome

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
