"""How long decode steps took, measured and simulated, by what was in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foretoken.domain.requests.serving_run import MeasuredRequest
from foretoken.simulator.grid import Flags, Floats
from foretoken.simulator.validation.serving_comparison import Pair, Timing


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
    """Stretches of decoding, each some steps long, and what ran with it.

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

    def keep(self, mask: Flags) -> "DecodeSamples":
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


# Fewer samples than this tell no slope from another.
_MIN_SAMPLES = 12
# Iterations and width (in medians of the absolute deviation) of the robust fit.
# Source: Huber, "Robust Statistics", 1981: 1.345 standard deviations, and 1.4826 to scale.
_ROUNDS = 20
_HUBER_WIDTH = 1.345 * 1.4826

FEATURES = ("batch", "context_tokens", "prefill_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """Milliseconds of a step: a constant, and per request, context token and prompt token."""

    constant_ms: float
    ms_per_batch: float
    ms_per_context_token: float
    ms_per_prefill_token: float

    def predict_ms(self, samples: DecodeSamples) -> Floats:
        """Return the cost of each stretch's mean step."""
        return np.asarray(
            self.constant_ms
            + self.ms_per_batch * samples.batch
            + self.ms_per_context_token * samples.context_tokens
            + self.ms_per_prefill_token * samples.prefill_tokens
        )


def fit_steps(samples: DecodeSamples) -> StepModel:
    """Fit a model whose slopes are not negative; a constant where the samples are too few."""
    design = np.column_stack(
        [np.ones(samples.num_samples)] + [getattr(samples, f) for f in FEATURES]
    )
    active = [0, 1, 2, 3] if samples.num_samples >= _MIN_SAMPLES else [0]
    while True:
        solution = fit_robust(design[:, active], samples.gap_ms, samples.weight)
        worst = int(np.argmin(solution))
        if active[worst] == 0 or solution[worst] >= 0:
            break
        del active[worst]
    values = np.zeros(4)
    values[active] = solution
    return StepModel(
        constant_ms=float(values[0]),
        ms_per_batch=float(values[1]),
        ms_per_context_token=float(values[2]),
        ms_per_prefill_token=float(values[3]),
    )


def fit_robust(design: Floats, target: Floats, weight: Floats) -> Floats:
    """Return the coefficients that fit best, outliers counting less (Huber).

    Columns that vary only with another, or are zero, get what a slight ridge gives them.
    """
    scale = np.sqrt(np.mean(design**2, axis=0))
    scale[scale == 0] = 1.0
    scaled = design / scale
    trust = np.ones(len(target))
    solution = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        row_weight = weight * trust
        gram = scaled.T @ (scaled * row_weight[:, None])
        ridge = 1e-6 * np.trace(gram) / len(gram) * np.eye(len(gram))
        solution = np.linalg.solve(gram + ridge, scaled.T @ (row_weight * target))
        residual = np.abs(target - scaled @ solution)
        width = _HUBER_WIDTH * float(np.median(residual))
        if width == 0.0:
            break
        trust = np.minimum(1.0, width / np.maximum(residual, width * 1e-9))
    return np.asarray(solution / scale)


# A stretch of so many tokens averages the client's jitter away, and its batch hardly changes.
_STRETCH = 16
# A range of batches is listed with at least this share of all gaps in it.
_MIN_SHARE = 0.02
# Ranges of prompt tokens computed in a step, from none to many.
_PREFILL_EDGES = (-np.inf, 1.0, 64.0, 512.0, np.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """Decode steps of one kind: those with `feature` above `low` and up to `high`.

    `measured_ms` is the median gap between tokens in them, `simulated_ms` what the simulation's
    steps would take with what was in the measured ones. `batch`, `context_tokens` and
    `prefill_tokens` are what was in them on average, as in `DecodeSamples`.
    """

    feature: str
    low: float
    high: float
    share_ratio: float
    measured_ms: float
    simulated_ms: float
    batch: float = 0.0
    context_tokens: float = 0.0
    prefill_tokens: float = 0.0

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
            ("prompts", self.mean_prefill_tokens, "ms_per_prefill_token"),
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
        inside: Flags = (values > low) & (values <= high)
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
                **{name: _mean(getattr(samples, name)[inside], weight) for name in FEATURES},
            )
        )
    return found


def _mean(values: Floats, weight: Floats) -> float:
    return float(values @ weight / weight.sum())


def _median(values: Floats, weight: Floats) -> float:
    """Return the weighted median, which a few stretches with a preemption in them do not move."""
    order = np.argsort(values)
    half = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
    return float(values[order][min(int(half), len(values) - 1)])
