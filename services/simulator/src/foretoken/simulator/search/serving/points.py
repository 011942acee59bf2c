"""The points of a search as columns: every deployment that was looked at, and what it does."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.serving.step_time import NUM_VARIANTS


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Deployments, one entry each; the figures are [variant, point].

    `kind` and `prefill_kind` (-1: aggregated) are numbers of engines, `router` of a router.
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
        num_devices=none,
        kv_ratio=np.zeros(num),
        ttft_us=figures,
        tpot_us=figures,
        rate_rps=figures,
        verdict=np.full(num, "ok", dtype=object),
        reason=np.full(num, "", dtype=object),
        is_near=np.zeros(num, dtype=np.bool_),
    )
