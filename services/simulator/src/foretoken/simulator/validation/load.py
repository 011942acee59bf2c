"""What a run had under way at a time: requests decoding, their context, prompt tokens computed."""

from dataclasses import dataclass

import numpy as np

from foretoken.simulator.validation.timing import Bools, Floats, Timing


class Cumulative:
    """The integral over time of what intervals add to a rate while they last."""

    def __init__(self, start_s: Floats, end_s: Floats, rate: Floats) -> None:
        times = np.concatenate([start_s, end_s])
        slopes = np.concatenate([rate, -rate])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        rates = np.cumsum(slopes[order])
        steps = np.diff(self._times) * rates[:-1]
        self._totals = np.concatenate([[0.0], np.cumsum(steps)])

    def between(self, start_s: Floats, end_s: Floats) -> Floats:
        """Return how much the integral grows from one time to another."""
        totals = np.interp(np.stack([start_s, end_s]), self._times, self._totals)
        return np.asarray(totals[1] - totals[0], dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSamples:
    """Stretches of decoding, each some steps long, and what ran beside it.

    `gap_ms` is the mean gap between tokens, `weight` the number of gaps, `batch` the mean number of
    requests decoding, `context_tokens` the mean of all their contexts, `prefill_tokens` the prompt
    tokens computed per gap.
    """

    gap_ms: Floats
    weight: Floats
    batch: Floats
    context_tokens: Floats
    prefill_tokens: Floats

    @property
    def num_samples(self) -> int:
        """Number of stretches."""
        return len(self.gap_ms)

    def keep(self, mask: Bools) -> "DecodeSamples":
        """Return the stretches where the mask is true."""
        return DecodeSamples(**{name: getattr(self, name)[mask] for name in self.__slots__})


class Load:
    """The load of a run over time.

    A request counts as decoding from its first token to its last, with half its answer as context;
    its prompt is computed evenly over `prefill_s` before the first token.
    """

    def __init__(self, timing: Timing, prefill_s: Floats) -> None:
        first_s, last_s = timing.first_token_s, timing.last_token_s
        context = timing.num_prefill_tokens + timing.num_decode_tokens / 2
        shortest_s = 1e-6
        span_s = np.maximum(prefill_s, shortest_s)
        self._batch = Cumulative(first_s, last_s, np.ones_like(first_s))
        self._context = Cumulative(first_s, last_s, context)
        self._prefill = Cumulative(first_s - span_s, first_s, timing.num_prefill_tokens / span_s)

    def sample(self, start_s: Floats, end_s: Floats, num_gaps: Floats) -> DecodeSamples:
        """Return the stretches from `start_s` to `end_s`; those without length are left out."""
        kept = (end_s > start_s) & (num_gaps > 0)
        start_s, end_s, num_gaps = start_s[kept], end_s[kept], num_gaps[kept]
        span_s = end_s - start_s
        return DecodeSamples(
            gap_ms=span_s * 1e3 / num_gaps,
            weight=num_gaps,
            batch=self._batch.between(start_s, end_s) / span_s,
            context_tokens=self._context.between(start_s, end_s) / span_s,
            prefill_tokens=self._prefill.between(start_s, end_s) / num_gaps,
        )


def sample_requests(timing: Timing, load: Load) -> DecodeSamples:
    """Return one stretch per request, from its first token to its last."""
    return load.sample(timing.first_token_s, timing.last_token_s, timing.num_decode_tokens - 1)
