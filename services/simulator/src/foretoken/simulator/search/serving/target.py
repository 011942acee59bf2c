"""The targets of a search, as far as a steady state can tell: by means."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingTargets
from foretoken.simulator.grid import Floats
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.points import Points

_US_PER_MS = 1000.0
# What loads are chosen to just meet, they meet.
_ROUNDING = 1e-9
# Where so many requests are to be within their SLO, the mean has to be; and a percentile from here
# up is above the mean of any latency that is not made of rare giants.
_MOST, _HIGH_PERCENTILE = 0.5, 90
# How many times a simulated mean TTFT the closed form may be: the most, 1.86 and 1.34, of the 48
# deployments of each mode that tests/benchmarks/bench_search_ttft.py simulates. Of prefill and
# decode apart (pairs) most of it is of requests that are all alike, which meet by chance.
TTFT_ERROR_RATIO, PAIR_TTFT_ERROR_RATIO = 1.9, 1.4


class HasTargets(Protocol):
    """What names targets."""

    @property
    def scenario(self) -> ServingScenario:
        """The scenario, with its SLOs."""

    @property
    def targets(self) -> ServingTargets:
        """The targets."""


def mean_limit_us(asked: HasTargets, metric: str) -> float:
    """Return the least limit on a latency, infinite where there is none.

    Below a limit on a high percentile the mean has to be at the least; others say nothing of it.
    """
    limits = [
        limit.limit_ms
        for limit in asked.targets.limits
        if limit.metric == metric
        and (limit.percentile == 0 or limit.percentile >= _HIGH_PERCENTILE)
    ]
    if asked.targets.slo_attainment_ratio >= _MOST:
        limits.append(getattr(asked.scenario.slo, metric, 0.0) or float("inf"))
    return min(limits, default=float("inf")) * _US_PER_MS


def rule_out_late(points: Points, asked: HasTargets, load: LoadProfile) -> Points:
    """Return the points with those ruled out that are over a limit on average.

    Those over a limit on TTFT alone by no more than the closed form may be wrong are marked.
    """
    is_near = np.zeros(len(points), dtype=np.bool_)
    for metric, figures in mean_latencies(points, load).items():
        limit_us = mean_limit_us(asked, metric)
        late = points.is_ok & (figures > limit_us * (1 + _ROUNDING))
        if late.any():
            reasons = [
                f"mean {LIMITED[metric].label} {value:,.4g} ms is over the limit of"
                f" {limit_us / _US_PER_MS:,.4g} ms"
                for value in (figures[late] / _US_PER_MS).tolist()
            ]
            points = points.rule_out(late, metric, reasons)
        if metric == "ttft_ms":
            is_pair = points.prefill_kind >= 0
            ratio = np.where(is_pair, PAIR_TTFT_ERROR_RATIO, TTFT_ERROR_RATIO)
            is_near = late & (figures <= limit_us * ratio * (1 + _ROUNDING))
        else:
            is_near &= figures <= limit_us * (1 + _ROUNDING)
    return replace(points, is_near=is_near)


def mean_latencies(points: Points, load: LoadProfile) -> Mapping[str, Floats]:
    """Return the mean latencies of points in µs, by metric."""
    ttft, tpot = points.ttft_us[0], points.tpot_us[0]
    answer = max(load.decode_mean - 1, 0.0)
    return {
        "tpot_ms": tpot,
        "ttft_ms": ttft,
        "itl_ms": tpot,
        "e2e_latency_ms": np.asarray(ttft + answer * tpot),
    }
