"""Run a workload at a rate and see whether the targets are met."""

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import NamedTuple, Protocol

import numpy as np

from foretoken.domain.requests.search import CapacityProbe
from foretoken.simulator.search.capacity.request_rate import stretch_plan, take_requests
from foretoken.simulator.search.capacity.verdict import Judge, Verdict, count_unseen
from foretoken.simulator.serving.metrics import is_completed
from foretoken.simulator.serving.occupancy import find_interval
from foretoken.simulator.serving.record import ServingRecord
from foretoken.simulator.workload.request_plan import RequestPlan

# Shares of the requests that are run first: a queue that grows shows in the first of them already.
_FIRST_SHARES = (1 / 16, 1 / 4)
# Fewer first requests than this are not worth a run of their own.
_LEAST_FIRST = 64


class Deployment(Protocol):
    """Runs any number of plans of requests."""

    def run(self, plan: RequestPlan, progress: Callable[[float], None]) -> ServingRecord:
        """Return what the engines did; `progress` hears the share of requests that are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Requests, the rate at which their plan has them arrive, and what runs and judges them."""

    deployment: Deployment
    plan: RequestPlan
    plan_rps: float
    judge: Judge

    def at_rate(self, rate_rps: float) -> RequestPlan:
        """Return the plan with the same requests at another rate."""
        return stretch_plan(self.plan, self.plan_rps / rate_rps)


class Probe(NamedTuple):
    """One run at a rate; of one that was cut short the verdict is kinder than the truth."""

    rate_rps: float
    verdict: Verdict
    num_requests: int
    output_tps: float
    is_cut_short: bool

    @property
    def log_rate(self) -> float:
        """The logarithm of the rate."""
        return log(self.rate_rps)

    @property
    def figures(self) -> CapacityProbe:
        """The probe as reports have it."""
        return CapacityProbe(
            rate_rps=self.rate_rps,
            is_met=self.verdict.is_met,
            is_cut_short=self.is_cut_short,
            num_requests=self.num_requests,
            output_throughput_tps=self.output_tps,
            outcomes=self.verdict.outcomes,
        )


def run_probe(
    load: Load, rate_rps: float, progress: Callable[[float], None], *, may_cut: bool = False
) -> tuple[Probe, ServingRecord]:
    """Return the verdict of the load at a rate, and the run.

    With `may_cut` the first requests are run alone at first. Nothing that arrives later changes
    what happens before, so where so many of them are late that the targets are missed even if all
    others took no time, the rest is not run: the verdict is that of the whole run.
    """
    plan = load.at_rate(rate_rps)
    if may_cut:
        for share in _FIRST_SHARES:
            num_first = round(plan.num_requests * share)
            if num_first < _LEAST_FIRST:
                continue
            first = take_requests(plan, np.arange(num_first))
            record = load.deployment.run(first, progress)
            verdict = load.judge.judge_kindly(record, count_unseen(plan, num_first))
            if not verdict.is_met:
                return _describe(rate_rps, verdict, record, is_cut_short=True), record
    record = load.deployment.run(plan, progress)
    return _describe(rate_rps, load.judge.judge(record), record), record


def _describe(
    rate_rps: float, verdict: Verdict, record: ServingRecord, *, is_cut_short: bool = False
) -> Probe:
    requests = record.requests
    duration_s = find_interval(record).duration_s
    num_tokens = float(np.asarray(requests.num_decode_tokens)[is_completed(requests)].sum())
    return Probe(
        rate_rps=rate_rps,
        verdict=verdict,
        num_requests=len(requests.arrival_ns),
        output_tps=num_tokens / duration_s if duration_s else 0.0,
        is_cut_short=is_cut_short,
    )
