"""The points of a search as columns: what each does, and which miss their targets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np

from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.request import LIMITED
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingTargets
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.serving.load import LoadProfile
from foretoken.simulator.search.serving.step_time import NUM_VARIANTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Deployments, one entry each; the figures are [variant, point].

    `kind` and `prefill_kind` (-1: aggregated) are numbers of engines, `router` of a router;
    `encoders` are replicas that encode images apart (0: engines do).
    `ttft_us` and `tpot_us` are what users see, `rate_rps` what all replicas together carry. Of one
    with a `verdict` other than "ok" the `reason` says what rules it out; figures it was not asked
    for are 0. One that `is_near` is over a limit on TTFT alone, by no more than the closed form may
    be wrong.
    """

    kind: Ints
    prefill_kind: Ints
    router: Ints
    batch: Ints
    step_limit: Ints
    replicas: Ints
    prefill_batch: Ints
    prefill_limit: Ints
    prefill_replicas: Ints
    encoders: Ints
    num_devices: Ints
    kv_ratio: Floats
    ttft_us: Floats
    tpot_us: Floats
    rate_rps: Floats
    verdict: np.ndarray
    reason: np.ndarray
    is_near: np.ndarray

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.kind)

    @property
    def is_ok(self) -> np.ndarray:
        """Which qualify."""
        return np.asarray(self.verdict == "ok", dtype=np.bool_)

    def take(self, rows: np.ndarray) -> "Points":
        """Return some points, in that order."""
        return Points(**{item.name: getattr(self, item.name)[..., rows] for item in fields(self)})

    def rule_out(self, rows: np.ndarray, verdict: str, reasons: Sequence[str]) -> "Points":
        """Return the points with those of a mask ruled out, a reason each; the first one counts."""
        verdicts, kept = self.verdict.copy(), self.reason.copy()
        verdicts[rows] = verdict
        kept[rows] = reasons
        return replace(self, verdict=verdicts, reason=kept)

    def readmit(self, rows: np.ndarray) -> "Points":
        """Return the points with those of a mask qualified again."""
        verdicts, kept = self.verdict.copy(), self.reason.copy()
        verdicts[rows], kept[rows] = "ok", ""
        return replace(self, verdict=verdicts, reason=kept)


def join_points(parts: Sequence[Points]) -> Points:
    """Return all points together."""
    if not parts:
        return empty_points(0)
    return Points(
        **{
            item.name: np.concatenate([getattr(part, item.name) for part in parts], axis=-1)
            for item in fields(Points)
        }
    )


def empty_points(num: int) -> Points:
    """Return points of no replicas that do nothing."""
    none, figures = np.zeros(num, dtype=np.int64), np.zeros((NUM_VARIANTS, num))
    return Points(
        kind=none,
        prefill_kind=none - 1,
        router=none,
        batch=none,
        step_limit=none,
        replicas=none,
        prefill_batch=none,
        prefill_limit=none,
        prefill_replicas=none,
        encoders=none,
        num_devices=none,
        kv_ratio=np.zeros(num),
        ttft_us=figures,
        tpot_us=figures,
        rate_rps=figures,
        verdict=np.full(num, "ok", dtype=object),
        reason=np.full(num, "", dtype=object),
        is_near=np.zeros(num, dtype=np.bool_),
    )


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
                f"mean {LIMITED[metric].label} {format_number(value, 4)} ms is over the limit of"
                f" {format_number(limit_us / _US_PER_MS, 4)} ms"
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
