"""What to profile next: points by the error their measuring removes for the GPU time it takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import LatencyQuery, LatencyReply, OperatorTable
from foretoken.domain.measurements.planning import PlannedPoint, PlanRequest, ProfilePlan
from foretoken.domain.operators.spec.operator import OperatorSpec, find_operator
from foretoken.domain.units import US_PER_S
from foretoken.predictor.features import Design, Matrix, build_design
from foretoken.predictor.intervals.coverage import hash_rows
from foretoken.predictor.model_set import ModelSet, Wanted
from foretoken.predictor.planning.error_field import ErrorField, thin_rows
from foretoken.predictor.query_columns import find_target, grid_columns, read_columns
from foretoken.predictor.regression.kriging import Scales, learn_scales
from foretoken.predictor.roofline import Columns, FloatColumn, IntColumn, Target
from foretoken.predictor.trainer import SeriesModel

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


Predict = Callable[[LatencyQuery], LatencyReply]

# What it takes to time a point: warming up and settling, then calls until the median is steady.
# Source: the profiler's own protocol, at least 25 ms and 10 calls, mostly two to three times that.
_SETTLE_S, _NUM_CALLS = 0.05, 25.0

# How many points of a series serve to learn how far errors stay alike.
_MAX_SCALED = 2_000
# What one knows before any measurement: errors stay alike over an octave, hardly any of them is
# noise, and 90 % of latencies are 0.5 to 3 times the typical one.
_UNKNOWN_NUGGET_LOG, _UNKNOWN_SILL_LOG = -4.0, 0.54


def plan_profile(models: ModelSet, request: PlanRequest, predict: Predict) -> ProfilePlan:
    """Return the points that lower the expected error most for the GPU time they take.

    `predict` says what a point will take. How far errors stay alike is learned from the series
    itself, else from the largest series of the operator on another device.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownOperatorError: no file of that name.
        InvalidRequestError: axes that are not the operator's dimensions, or an operator without a
            sweep of its own and without axes.

    """
    spec = find_operator(request.operator)
    target = find_target(spec, request.device, request.topology, request.dtype, request.phase)
    columns = read_columns(spec, _candidates(spec, target, request))
    design = build_design(spec, columns, target)
    model = _find_model(models, spec, target, request)
    known = model.series.design if model else design.take(np.arange(0))
    is_new = ~np.isin(hash_rows(design.points), hash_rows(known.points))
    latency_us = _price(request, columns, predict)
    gpu_s = (_SETTLE_S + _NUM_CALLS * latency_us / US_PER_S) * _num_gpus(columns)
    ranking = rank_points(
        PlanQuestion(
            candidates=design.axes[is_new],
            known=known.axes,
            gpu_s=gpu_s[is_new],
            scales=_learn_scales(model or _largest(models, spec, target), design, request.seed),
            budget_gpu_s=request.budget_gpu_s,
            max_points=request.max_num_points,
            seed=request.seed,
        )
    )
    rows = np.flatnonzero(is_new)[ranking.rows]
    errors = ranking.error_ratio.tolist()
    points = tuple(
        PlannedPoint(
            dims={name: int(column[row]) for name, column in columns.items()},
            latency_us=float(latency_us[row]),
            gpu_s=float(gpu_s[row]),
            error_ratio=error,
        )
        for row, error in zip(rows.tolist(), errors, strict=True)
    )
    return ProfilePlan(
        points=points,
        num_candidates=len(is_new),
        num_measured=int((~is_new).sum()),
        error_before_ratio=ranking.error_before_ratio,
        error_after_ratio=errors[-1] if errors else ranking.error_before_ratio,
        gpu_s=float(gpu_s[rows].sum()),
        model_version=models.version,
    )


def _candidates(
    spec: OperatorSpec, target: Target, request: PlanRequest
) -> Mapping[str, IntColumn]:
    """Return what may be measured; without axes groups of one node, where a node has several."""
    if request.axes:
        return grid_columns(request.axes)
    swept = list(spec.sweep(False))
    if target.topology is not None:
        num_devices = target.topology.devices_per_node
        swept = [dims for dims in swept if dims["devices_per_node"] <= num_devices]
        swept = [dims for dims in swept if dims["num_nodes"] == 1] or swept
    if not swept:
        reason = f"{spec.name} has no sweep of its own: say which values may be measured"
        raise InvalidRequestError.of_field("axes", reason)
    return {name: np.array([dims[name] for dims in swept]) for name in spec.dim_names}


def _find_model(
    models: ModelSet, spec: OperatorSpec, target: Target, request: PlanRequest
) -> SeriesModel | None:
    choice = models.choose(spec, target, Wanted(request.framework, request.variant))
    return choice.model if choice is not None and not choice.is_other_code else None


def _largest(models: ModelSet, spec: OperatorSpec, target: Target) -> SeriesModel | None:
    """Return the model of the operator elsewhere that rests on the most points."""
    others = [
        head
        for head in models.heads
        if head.key.spec.name == spec.name and head.key.target.phase is target.phase
    ]
    largest = max(others, key=lambda head: head.num_points, default=None)
    return models.series[largest.key] if largest else None


def _learn_scales(model: SeriesModel | None, candidates: Design, seed: int) -> Scales:
    """Return how far errors stay alike: as in a series, or as one knows before any measurement."""
    if model is None:
        lengths_log = np.zeros(candidates.axes.shape[1])
        return Scales(lengths_log, _UNKNOWN_NUGGET_LOG, _UNKNOWN_SILL_LOG)
    design = model.series.design
    rows = thin_rows(design.num_rows, _MAX_SCALED, seed)
    log_ratio = np.log(model.series.latency_us / design.base_us)
    return learn_scales(design.axes[rows], log_ratio[rows], seed)


def _price(request: PlanRequest, columns: Columns, predict: Predict) -> FloatColumn:
    table = OperatorTable(
        operator=request.operator,
        dtype=request.dtype,
        phase=request.phase,
        columns=columns,
        variant=request.variant,
    )
    query = LatencyQuery(
        device=request.device,
        tables=(table,),
        topology=request.topology,
        preferred_framework=request.framework,
    )
    return np.asarray(predict(query).tables[0].latency_us)


def _num_gpus(columns: Columns) -> IntColumn | int:
    """Return how many GPUs a call keeps busy: all those of a collective's group."""
    if "devices_per_node" not in columns:
        return 1
    return np.asarray(columns["devices_per_node"] * columns["num_nodes"])
