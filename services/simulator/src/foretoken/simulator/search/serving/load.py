"""What a closed form has to know of a workload: a few moments of its lengths."""

from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.grid import Floats
from foretoken.simulator.serving.outcome import rate_of
from foretoken.simulator.workload.request_plan import RequestPlan
from foretoken.simulator.workload.requests import resolve_workload

# Beyond this many requests, taken evenly of all, the moments of lengths hardly change.
_MAX_SAMPLE = 1024
# Batches for which the longest context is known; between them it is linear in their logarithm.
_BATCHES = 2.0 ** np.arange(13)
# Places in an answer at which contexts are looked at: the middles of as many equal parts.
_NUM_PLACES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadProfile:
    """Lengths of the requests, in tokens.

    `context_mean` is that of a decoding request at a random step: a long answer is seen for longer;
    `raggedness` is the longest context of 1, 2, 4, ... such requests over it. `longest` and
    `shortest` are of prompt and answer together, `prefill_second_ratio` is the mean square of
    prompts over the square of their mean. `is_even` where all requests are alike: prompts of a
    closed loop that are computed apart then keep the order and the gaps in which they first came.
    `rate_rps` is that of a trace.
    """

    prefill_mean: float
    decode_mean: float
    prefill_second_ratio: float
    context_mean: float
    raggedness: tuple[float, ...]
    longest: int
    is_even: bool
    shortest: int = 1
    rate_rps: float = 0.0

    @property
    def past_tokens(self) -> float:
        """Return the answer's tokens before the one that a decoding request gets, on average."""
        return max(self.context_mean - self.prefill_mean, 0.0)

    def raggedness_of(self, num_seqs: Floats) -> Floats:
        """Return how much longer than the mean the longest context of so many requests is."""
        places = np.log2(np.clip(num_seqs, 1.0, _BATCHES[-1]))
        ragged: Floats = np.interp(places, np.log2(_BATCHES), self.raggedness)
        return ragged

    def stretched(self, prefill_ratio: float, decode_ratio: float) -> "LoadProfile":
        """Return the load with prompts and answers so many times as long."""
        prefill = self.prefill_mean * prefill_ratio
        decode = self.decode_mean * decode_ratio
        # Of a context the prompt is one part and the answer so far the other.
        grown = self.past_tokens * decode_ratio
        ratio = (prefill + decode) / (self.prefill_mean + self.decode_mean)
        return replace(
            self,
            prefill_mean=prefill,
            decode_mean=decode,
            context_mean=prefill + grown,
            longest=round(self.longest * ratio),
            shortest=round(self.shortest * ratio),
        )


def profile_load(scenario: ServingScenario) -> LoadProfile:
    """Return the moments of a scenario's lengths.

    Raises:
        InvalidRequestError: the workload cannot be used.
        UnknownPluginError: no such arrival process.

    """
    plan = resolve_workload(scenario.workload, scenario.slo_classes, scenario.seed)
    return _profile_plan(plan, has_times=scenario.workload.arrival == "trace")


def _profile_plan(plan: RequestPlan, *, has_times: bool) -> LoadProfile:
    num_requests = len(plan.num_prefill_tokens)
    # A trace need not begin as it goes on.
    num_taken = min(num_requests, _MAX_SAMPLE)
    sample = np.arange(num_taken) * num_requests // num_taken
    prefill = np.asarray(plan.num_prefill_tokens, dtype=np.float64)[sample]
    decode = np.asarray(plan.num_decode_tokens, dtype=np.float64)[sample]
    steps = np.maximum(decode - 1.0, 0.0)
    # Contexts of decoding requests at a random step, and how likely each is.
    places = (np.arange(_NUM_PLACES) + 0.5) / _NUM_PLACES
    contexts = (prefill[:, None] + 0.5 + steps[:, None] * places).ravel()
    weights = np.repeat(steps if steps.any() else np.ones(len(steps)), _NUM_PLACES)
    context_mean = float(np.average(contexts, weights=weights))
    return LoadProfile(
        prefill_mean=float(prefill.mean()),
        decode_mean=float(decode.mean()),
        prefill_second_ratio=float((prefill**2).mean() / prefill.mean() ** 2),
        context_mean=context_mean,
        raggedness=_raggedness(contexts / context_mean, weights),
        longest=int((plan.num_prefill_tokens + plan.num_decode_tokens).max()),
        is_even=bool(np.ptp(prefill) == 0 and np.ptp(decode) == 0),
        shortest=int((plan.num_prefill_tokens + plan.num_decode_tokens).min()),
        rate_rps=rate_of(plan.arrival_ns) if has_times else 0.0,
    )


def _raggedness(ratios: Floats, weights: Floats) -> tuple[float, ...]:
    """Return the mean of the largest of 1, 2, 4, ... independent draws."""
    order = np.argsort(ratios)
    below = np.cumsum(weights[order]) / weights.sum()
    powers = np.diff(below[None, :] ** _BATCHES[:, None], axis=1, prepend=0.0)
    return tuple((powers @ ratios[order]).tolist())
