"""Where the difference between a measured run and its simulation sits."""

from dataclasses import dataclass

import numpy as np

from foretoken.domain.units import MS_PER_S
from foretoken.simulator.validation.comparison import Pair
from foretoken.simulator.validation.step_model import fit_robust
from foretoken.simulator.validation.timing import Floats

FRONT_END = "front end"
QUEUEING = "queueing"
PREFILL = "prefill"
DECODE = "decode"
UNEXPLAINED = "unexplained"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentError:
    """One part of the time of a mean request, in ms.

    `share_ratio` is its part of the error: its mean error per request without the sign, over that
    of all parts; `ttft_share_ratio` the same of the parts before the first token. Where the run
    does not say when a request was scheduled, the parts before the first token are estimated.
    """

    name: str
    measured_ms: float
    simulated_ms: float
    share_ratio: float
    ttft_share_ratio: float
    is_estimated: bool

    @property
    def error_ms(self) -> float:
        """Simulated less measured."""
        return self.simulated_ms - self.measured_ms


def split_residual(pair: Pair) -> tuple[ComponentError, ...]:
    """Return the parts of a request's time: front end, queueing, prefill, decode.

    Front end is from sending to the engine's queue, queueing from there to the first step, prefill
    from there to the first token, decode the rest.
    """
    is_known = pair.measured.has_schedule
    before = _observed_parts(pair) if is_known else _estimated_parts(pair)
    measured, simulated = pair.measured, pair.simulated
    decode = measured.latency_ms("decode_ms"), simulated.latency_ms("decode_ms")
    sizes = {name: float(np.abs(theirs - ours).mean()) for name, (ours, theirs) in before.items()}
    before_total = sum(sizes.values()) or 1.0
    sizes[DECODE] = float(np.abs(decode[1] - decode[0]).mean())
    total = sum(sizes.values()) or 1.0
    return tuple(
        ComponentError(
            name=name,
            measured_ms=float(ours.mean()),
            simulated_ms=float(theirs.mean()),
            share_ratio=sizes[name] / total,
            ttft_share_ratio=0.0 if name == DECODE else sizes[name] / before_total,
            is_estimated=not is_known and name != DECODE,
        )
        for name, (ours, theirs) in {**before, DECODE: decode}.items()
    )


def _parts(pair: Pair) -> tuple[Floats, Floats, Floats]:
    """Return the simulated front end, queueing and prefill of each request, in ms."""
    timing = pair.simulated
    queued_s = np.where(timing.queued_s >= 0, timing.queued_s, timing.arrival_s)
    return (
        (queued_s - timing.arrival_s) * MS_PER_S,
        (timing.scheduled_s - queued_s) * MS_PER_S,
        (timing.first_token_s - timing.scheduled_s) * MS_PER_S,
    )


def _observed_parts(pair: Pair) -> dict[str, tuple[Floats, Floats]]:
    front, queueing, prefill = _parts(pair)
    timing = pair.measured
    queued_s = np.where(timing.queued_s >= 0, timing.queued_s, timing.arrival_s)
    return {
        FRONT_END: ((queued_s - timing.arrival_s) * MS_PER_S, front),
        QUEUEING: ((timing.scheduled_s - queued_s) * MS_PER_S, queueing),
        PREFILL: ((timing.first_token_s - timing.scheduled_s) * MS_PER_S, prefill),
    }


def _estimated_parts(pair: Pair) -> dict[str, tuple[Floats, Floats]]:
    """Regress the error of TTFT on what the simulation says queueing and prefill took.

    What neither explains is a constant, which is put down to the front end, and a rest.
    """
    front, queueing, prefill = _parts(pair)
    ttft_ms = pair.measured.latency_ms("ttft_ms")
    error = ttft_ms - pair.simulated.latency_ms("ttft_ms")
    design = np.column_stack([np.ones_like(error), queueing, prefill])
    constant, per_queueing, per_prefill = fit_robust(design, error, np.ones_like(error)).tolist()
    # A part cannot have taken less than no time.
    measured_queueing = queueing * max(1.0 + per_queueing, 0.0)
    measured_prefill = prefill * max(1.0 + per_prefill, 0.0)
    measured_front = np.maximum(front + constant, 0.0)
    rest = (
        pair.measured.latency_ms("ttft_ms") - measured_front - measured_queueing - measured_prefill
    )
    return {
        FRONT_END: (measured_front, front),
        QUEUEING: (measured_queueing, queueing),
        PREFILL: (measured_prefill, prefill),
        UNEXPLAINED: (rest, np.zeros_like(rest)),
    }
