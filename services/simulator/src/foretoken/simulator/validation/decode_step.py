"""How long decode steps took beside what the simulation thinks, by what was in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foretoken.domain.requests.serving_run import MeasuredRequest
from foretoken.simulator.validation.comparison import Pair
from foretoken.simulator.validation.load import DecodeSamples, Load, sample_requests
from foretoken.simulator.validation.step_model import StepModel, fit_steps
from foretoken.simulator.validation.timing import Bools, Floats

# A stretch of so many tokens averages the client's jitter away, and its batch hardly changes.
_STRETCH = 16
# A range of batches is told of with at least this share of all gaps in it.
_MIN_SHARE = 0.02
# Ranges of prompt tokens computed in a step, from none to many.
_PREFILL_EDGES = (-np.inf, 1.0, 64.0, 512.0, np.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """Decode steps of one kind: those with `feature` above `low` and up to `high`.

    `measured_ms` is the median gap between tokens in them, `simulated_ms` what the simulation's
    steps would take with what was in the measured ones.
    """

    feature: str
    low: float
    high: float
    share_ratio: float
    measured_ms: float
    simulated_ms: float

    @property
    def error_ratio(self) -> float:
        """Simulated over measured less one."""
        return self.simulated_ms / self.measured_ms - 1.0 if self.measured_ms else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeComparison:
    """Decode steps measured and simulated.

    `measured_model` and `simulated_model` are fitted alike to both; `mean` is what was in a mean
    measured step. `has_token_times` says whether single tokens were seen or whole answers only.
    """

    measured_model: StepModel
    simulated_model: StepModel
    mean_batch: float
    mean_context_tokens: float
    mean_prefill_tokens: float
    ranges: tuple[StepRange, ...]
    has_token_times: bool
    num_samples: int

    @property
    def parts(self) -> tuple[tuple[str, float, float], ...]:
        """What a mean measured step is made of: (name, ms measured, ms simulated)."""
        ours, theirs = self.measured_model, self.simulated_model
        amounts = (
            ("constant", 1.0, "constant_ms"),
            ("per request", self.mean_batch, "ms_per_batch"),
            ("context", self.mean_context_tokens, "ms_per_context_token"),
            ("prompts beside", self.mean_prefill_tokens, "ms_per_prefill_token"),
        )
        return tuple(
            (name, amount * getattr(ours, field), amount * getattr(theirs, field))
            for name, amount, field in amounts
        )


def compare_decode(pair: Pair) -> DecodeComparison | None:
    """Return how decode steps compare; None where no answer had a second token.

    Measured stretches are priced with a model of the simulated steps, so that a simulation which
    had other requests in its batches at that time is not blamed for it.
    """
    simulated_prefill_s = pair.simulated.first_token_s - pair.simulated.scheduled_s
    measured_prefill_s = (
        pair.measured.first_token_s - pair.measured.scheduled_s
        if pair.measured.has_schedule
        else simulated_prefill_s
    )
    load = Load(pair.measured, measured_prefill_s)
    measured = sample_chunks(pair.requests, load)
    has_token_times = measured.num_samples > 0
    if not has_token_times:
        measured = sample_requests(pair.measured, load)
    simulated = sample_requests(pair.simulated, Load(pair.simulated, simulated_prefill_s))
    if not measured.num_samples or not simulated.num_samples:
        return None
    model = fit_steps(simulated)
    weight = measured.weight / measured.weight.sum()
    return DecodeComparison(
        measured_model=fit_steps(measured),
        simulated_model=model,
        mean_batch=float(weight @ measured.batch),
        mean_context_tokens=float(weight @ measured.context_tokens),
        mean_prefill_tokens=float(weight @ measured.prefill_tokens),
        ranges=tuple(_ranges(measured, model)),
        has_token_times=has_token_times,
        num_samples=measured.num_samples,
    )


def sample_chunks(requests: Sequence[MeasuredRequest], load: Load) -> DecodeSamples:
    """Return stretches of some tokens each, of the requests whose tokens were seen one by one."""
    starts: list[float] = []
    ends: list[float] = []
    counts: list[int] = []
    for request in requests:
        if not request.chunk_s:
            continue
        sizes = request.chunk_tokens or (1,) * len(request.chunk_s)
        if sum(sizes) != request.num_decode_tokens:
            continue
        received = np.cumsum(sizes)
        places = np.searchsorted(received, np.arange(1, received[-1] + 1, _STRETCH))
        places = np.unique(np.append(places, len(sizes) - 1))
        for first, last in pairwise(places.tolist()):
            starts.append(request.chunk_s[first])
            ends.append(request.chunk_s[last])
            counts.append(int(received[last] - received[first]))
    return load.sample(np.array(starts), np.array(ends), np.array(counts, dtype=np.float64))


def _ranges(samples: DecodeSamples, model: StepModel) -> list[StepRange]:
    highest = max(float(samples.batch.max()), 1.0)
    powers = 2.0 ** np.arange(0, np.ceil(np.log2(highest)) + 1)
    batch_edges = [0.0, *powers.tolist(), np.inf]
    predicted = model.predict_ms(samples)
    return [
        *_ranges_of("batch", samples.batch, batch_edges, samples, predicted),
        *_ranges_of("prefill_tokens", samples.prefill_tokens, _PREFILL_EDGES, samples, predicted),
    ]


def _ranges_of(
    feature: str, values: Floats, edges: Sequence[float], samples: DecodeSamples, predicted: Floats
) -> list[StepRange]:
    found = []
    ratios = predicted / samples.gap_ms
    for low, high in pairwise(edges):
        inside: Bools = (values > low) & (values <= high)
        weight = samples.weight[inside]
        share = float(weight.sum() / samples.weight.sum())
        if share < _MIN_SHARE:
            continue
        measured_ms = _median(samples.gap_ms[inside], weight)
        found.append(
            StepRange(
                feature=feature,
                low=max(low, 0.0),
                high=high if np.isfinite(high) else float(values.max()),
                share_ratio=share,
                measured_ms=measured_ms,
                simulated_ms=measured_ms * _median(ratios[inside], weight),
            )
        )
    return found


def _median(values: Floats, weight: Floats) -> float:
    """Return the weighted median, which a few stretches with a preemption in them do not move."""
    order = np.argsort(values)
    half = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
    return float(values[order][min(int(half), len(values) - 1)])
