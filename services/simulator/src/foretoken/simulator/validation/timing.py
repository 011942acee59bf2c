"""When the requests of a run came, began and ended, measured and simulated in the same form."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.request import Instants
from foretoken.domain.requests.serving_run import MeasuredRequest
from foretoken.domain.results.report import RequestColumns
from foretoken.domain.units import MS_PER_S
from foretoken.simulator.serving.metrics import defined_latencies

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One entry per request, in the order they were sent; times in s, below 0 where not known."""

    arrival_s: Floats
    queued_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    num_prefill_tokens: Floats
    num_decode_tokens: Floats

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    @property
    def has_schedule(self) -> bool:
        """Whether it is known of every request when the engine first scheduled it."""
        return bool(self.num_requests and np.all(self.scheduled_s >= 0))

    def latency_ms(self, name: str) -> Floats:
        """Return a latency of every request, by its metric; NaN where it has none."""
        times = Instants(
            arrival=self.arrival_s,
            scheduled=self.scheduled_s,
            first_token=self.first_token_s,
            finished=self.last_token_s,
            num_decode_tokens=self.num_decode_tokens,
        )
        values, is_defined = defined_latencies(name, times)
        return np.where(is_defined, values * MS_PER_S, np.nan)

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token."""
        return float(self.last_token_s.max() - self.arrival_s.min())

    def keep(self, mask: Bools) -> "Timing":
        """Return the requests where the mask is true."""
        return Timing(**{name: getattr(self, name)[mask] for name in self.__slots__})


def timing_of_measured(requests: Sequence[MeasuredRequest]) -> Timing:
    """Return the timing of measured requests."""
    return Timing(
        **{
            name: np.array([getattr(request, name) for request in requests], dtype=np.float64)
            for name in Timing.__slots__
        }
    )


def timing_of_simulated(columns: RequestColumns) -> Timing:
    """Return the timing of simulated requests; those never finished have times below 0."""
    scheduled_s = np.asarray(columns.scheduled_s, dtype=np.float64)
    queued_s = np.asarray(columns.queued_s, dtype=np.float64)
    return Timing(
        arrival_s=np.asarray(columns.arrival_s, dtype=np.float64),
        queued_s=queued_s if len(queued_s) else np.full(len(scheduled_s), -1.0),
        scheduled_s=scheduled_s,
        first_token_s=np.asarray(columns.first_token_s, dtype=np.float64),
        last_token_s=np.asarray(columns.finished_s, dtype=np.float64),
        num_prefill_tokens=np.asarray(columns.num_prefill_tokens, dtype=np.float64),
        num_decode_tokens=np.asarray(columns.num_decode_tokens, dtype=np.float64),
    )


def check_same_workload(measured: Timing, simulated: Timing) -> None:
    """Check that both served the same requests in the same order.

    Raises:
        InvalidRequestError: they did not; names the first request that differs.

    """
    if measured.num_requests != simulated.num_requests:
        counts = f"{measured.num_requests} measured, {simulated.num_requests} simulated"
        raise InvalidRequestError.of_field("--measured", f"not the same requests: {counts}")
    for name in ("num_prefill_tokens", "num_decode_tokens"):
        ours, theirs = getattr(measured, name), getattr(simulated, name)
        differing = np.flatnonzero(ours != theirs)
        if len(differing):
            index = int(differing[0])
            problem = f"{ours[index]:.0f} measured, {theirs[index]:.0f} simulated"
            raise InvalidRequestError.of_field(
                "--measured", f"{name} of request {index}: {problem}"
            )
