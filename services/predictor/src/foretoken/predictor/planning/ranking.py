"""Rank points by the error that measuring them removes for the GPU time it takes."""

from dataclasses import dataclass

import numpy as np

from foretoken.predictor.features import Matrix
from foretoken.predictor.planning.error_field import ErrorField, thin_rows
from foretoken.predictor.regression.kriging import Scales
from foretoken.predictor.roofline import FloatColumn, IntColumn

# How many candidates are weighed, against how many the error is judged, and how many of the points
# known count. Source: on a GEMM table of 35,000 points twice as many change nothing.
_MAX_CANDIDATES, _MAX_JUDGED, _MAX_KNOWN = 2_000, 400, 2_000

# Points that cost nothing are worth no more than those of a microsecond.
_LEAST_GPU_S = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanQuestion:
    """What may be measured, at what cost, and what is known.

    `candidates` and `known` are rows of the operator's axes (`Design.axes`), `gpu_s` the cost of
    every candidate in GPU-seconds; `scales` say how far errors stay alike, learned from the
    points known or from those of a sibling device. `max_points` 0 is no limit.
    """

    candidates: Matrix
    known: Matrix
    gpu_s: FloatColumn
    scales: Scales
    budget_gpu_s: float
    max_points: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Rows of the candidates, the next to measure first.

    `error_ratio` is the mean relative error to expect over all candidates once a row and those
    before it are measured, `error_before_ratio` that as things are.
    """

    rows: IntColumn
    error_ratio: FloatColumn
    error_before_ratio: float


def rank_points(question: PlanQuestion) -> Ranking:
    """Return the candidates to measure within the budget, greedily.

    Every step takes the candidate that lowers the variance over all candidates most per
    GPU-second of those that the rest of the budget pays for.
    """
    num_candidates = len(question.candidates)
    rows = thin_rows(num_candidates, _MAX_CANDIDATES, question.seed)
    judged = thin_rows(num_candidates, _MAX_JUDGED, question.seed + 1)
    known = question.known[thin_rows(len(question.known), _MAX_KNOWN, question.seed)]
    candidates = question.candidates
    field = ErrorField(candidates[rows], candidates[judged], known, question.scales)
    before = field.error_ratio
    chosen: list[int] = []
    errors: list[float] = []
    cost = question.gpu_s[rows]
    is_open = np.ones(len(rows), dtype=bool)
    left_gpu_s = question.budget_gpu_s
    limit = min(question.max_points or len(rows), len(rows))
    while len(chosen) < limit:
        is_open &= cost <= left_gpu_s
        if not is_open.any():
            break
        worth = np.where(is_open, field.gains() / np.maximum(cost, _LEAST_GPU_S), -np.inf)
        best = int(np.argmax(worth))
        field.measure(best)
        is_open[best] = False
        left_gpu_s -= float(cost[best])
        chosen.append(best)
        errors.append(field.error_ratio)
    return Ranking(
        rows=rows[np.array(chosen, dtype=np.int64)],
        error_ratio=np.array(errors),
        error_before_ratio=before,
    )
