"""Poisson arrivals whose rate changes from state to state: calm and busy times.

The states follow each other in a circle, each for an exponential time. Options, one number per
state: `dwell_s`, the mean times; `rate_ratios`, the rates to each other, which keep the mean rate
at `rate_rps`; or `rates_rps`, the rates as they are. A state's rate may be 0, not all.
"""

import numpy as np

from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.grid import Floats
from foretoken.simulator.workload.request_plan import (
    RequestDraft,
    check_options,
    option_error,
    read_numbers,
)
from foretoken.simulator.workload.requests import draw_requests
from foretoken.simulator.workload.rng import named_stream

# Without options: as long calm as busy, three times the rate while busy.
_RATE_RATIOS = "1, 3"
_DWELL_S = "30, 30"

# Changes of state are drawn at once; with more of them the rate is constant at any scale of use.
_MAX_CHANGES = 10_000_000


def _draw(spec: WorkloadSpec, seed: int) -> RequestDraft:
    check_options(spec, ("rates_rps", "rate_ratios", "dwell_s"))
    dwell_s = read_numbers(spec, "dwell_s", _DWELL_S)
    if (dwell_s <= 0).any():
        raise option_error("dwell_s", "must be positive")
    rates_rps = _read_rates(spec, dwell_s)

    def place(count: int, stream: np.random.Generator) -> Floats:
        # Arrivals of rate 1 on the clock that counts expected arrivals, taken back to seconds.
        expected = np.cumsum(stream.exponential(1.0, count))
        changes = named_stream(seed, "arrival_states")
        change_s, at_change = _draw_states(rates_rps, dwell_s, expected[-1], changes)
        return np.asarray(np.interp(expected, at_change, change_s), dtype=np.float64)

    return draw_requests(spec, seed, place)


def _read_rates(spec: WorkloadSpec, dwell_s: Floats) -> Floats:
    name = "rates_rps" if "rates_rps" in spec.arrival_options else "rate_ratios"
    if name == "rates_rps" and "rate_ratios" in spec.arrival_options:
        raise option_error("rate_ratios", "give rates_rps or rate_ratios")
    rates = read_numbers(spec, name, _RATE_RATIOS)
    if len(rates) != len(dwell_s):
        raise option_error(
            name, f"needs a number for each of the {len(dwell_s)} dwell_s, found {len(rates)}"
        )
    if not (rates > 0).any():
        raise option_error(name, "must not all be 0")
    if name == "rates_rps":
        return rates
    if not np.isfinite(spec.rate_rps):
        raise option_error(name, "a rate without limit has no states")
    scale = spec.rate_rps * dwell_s.sum() / (rates @ dwell_s)
    return rates * float(scale)


def _draw_states(
    rates_rps: Floats, dwell_s: Floats, num_expected: float, stream: np.random.Generator
) -> tuple[Floats, Floats]:
    """Return when the state changes, in s, and how many arrivals are expected until then."""
    # In the long run a state is met as often as its time says; what is left of an exponential
    # stay is distributed as the whole one.
    state = stream.choice(len(dwell_s), p=dwell_s / dwell_s.sum())
    rounds = num_expected / (rates_rps @ dwell_s)
    if rounds * len(dwell_s) > _MAX_CHANGES:
        raise option_error(
            "dwell_s", f"changes more than {_MAX_CHANGES} times while the requests arrive"
        )
    change_s, at_change = np.zeros(1), np.zeros(1)
    while at_change[-1] < num_expected:
        # Half again as much as is expected to be missing, and a few rounds.
        missing = (num_expected - at_change[-1]) / (rates_rps @ dwell_s)
        states = (state + np.arange((int(1.5 * missing) + 8) * len(dwell_s))) % len(dwell_s)
        stays = stream.exponential(1.0, len(states)) * dwell_s[states]
        change_s = np.append(change_s, change_s[-1] + np.cumsum(stays))
        at_change = np.append(at_change, at_change[-1] + np.cumsum(stays * rates_rps[states]))
    return change_s, at_change


ARRIVAL = _draw
