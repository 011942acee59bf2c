"""The highest rate of other requests, or with other step times, near one that is known.

Of plain data, so that the workers of a search find many of them at the same time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, inf, log

from foretoken.simulator.search.capacity.confidence import MarginCurve, find_crossing
from foretoken.simulator.search.capacity.probe import Load, run_probe
from foretoken.simulator.workload.request_plan import RequestPlan

# A rate so much lower that requests hardly meet.
_IDLE_RATIO = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherLoad:
    """What differs from the load of a search, and how many runs its own highest rate may take.

    `name` is that of the basis' load whose steps it has. Without a `plan` the requests are that
    load's; with one they are others, which arrive `plan_rps` times per second.
    """

    name: str
    num_runs: int
    plan: RequestPlan | None = None
    plan_rps: float = 0.0
    tolerance: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """What other loads share: loads by name, and the curve of the search."""

    loads: Mapping[str, Load]
    curve: MarginCurve


def find_highest_rate(other: OtherLoad, basis: Basis) -> float:
    """Return the logarithm of the highest rate (1/s) at which another load meets the targets.

    Found by few runs; minus infinity where no rate meets them. That is looked at only where the
    steps differ: other requests of the kind hardly meet at a low rate, as the search's own.
    """
    load = basis.loads[other.name]
    if other.plan is not None:
        load = replace(load, plan=other.plan, plan_rps=other.plan_rps)
    margins: list[float] = []

    def margin_at(log_rate: float) -> float:
        margins.append(run_probe(load, exp(log_rate), lambda _: None)[0].verdict.margin)
        return margins[-1]

    root = basis.curve.root
    found = find_crossing(margin_at, basis.curve, root, other.num_runs, other.tolerance)
    if other.plan is None and min(margins) > 0 and margin_at(root + log(_IDLE_RATIO)) > 0:
        return -inf
    return found
